//! `ibv_wr_*`: building send work requests in place.
//!
//! A non-null pointer does not prove that a function exists: `wr_flush` and `wr_atomic_write` are newer than some
//! libraries, which store other data at that offset. Only call operations that the queue pair was created with
//! (`send_ops_flags`).

use core::ffi::{c_int, c_void};

use super::object;
use crate::bindings::*;

object! {
    /// Starts an atomic compare and swap.
    fn ibv_wr_atomic_cmp_swp(
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        compare: u64,
        swap: u64,
    ) = wr_atomic_cmp_swp;

    /// Starts an atomic fetch and add.
    fn ibv_wr_atomic_fetch_add(
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        add: u64,
    ) = wr_atomic_fetch_add;

    /// Starts binding a type 2 memory window.
    fn ibv_wr_bind_mw(
        qp: *mut ibv_qp_ex,
        mw: *mut ibv_mw,
        rkey: u32,
        bind_info: *const ibv_mw_bind_info,
    ) = wr_bind_mw;

    /// Starts invalidating a local key.
    fn ibv_wr_local_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) = wr_local_inv;

    /// Starts an RDMA read.
    fn ibv_wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) = wr_rdma_read;

    /// Starts an RDMA write.
    fn ibv_wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) = wr_rdma_write;

    /// Starts an RDMA flush (rdma-core 45).
    fn ibv_wr_flush(
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        len: usize,
        type_: u8,
        level: u8,
    ) = wr_flush;

    /// Starts an RDMA write with immediate data in network byte order.
    fn ibv_wr_rdma_write_imm(
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        imm_data: __be32,
    ) = wr_rdma_write_imm;

    /// Starts a send.
    fn ibv_wr_send(qp: *mut ibv_qp_ex) = wr_send;

    /// Starts a send with immediate data in network byte order.
    fn ibv_wr_send_imm(qp: *mut ibv_qp_ex, imm_data: __be32) = wr_send_imm;

    /// Starts a send that invalidates a remote key of the peer.
    fn ibv_wr_send_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) = wr_send_inv;

    /// Starts a send that the device segments (TSO).
    fn ibv_wr_send_tso(qp: *mut ibv_qp_ex, hdr: *mut c_void, hdr_sz: u16, mss: u16) = wr_send_tso;

    /// Sets the destination of the started datagram.
    fn ibv_wr_set_ud_addr(
        qp: *mut ibv_qp_ex,
        ah: *mut ibv_ah,
        remote_qpn: u32,
        remote_qkey: u32,
    ) = wr_set_ud_addr;

    /// Sets the peer's shared receive queue of the started XRC request.
    fn ibv_wr_set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) = wr_set_xrc_srqn;

    /// Copies the data of the started request from one buffer. The rxe provider requires `IBV_SEND_INLINE` in
    /// `wr_flags`, set before the request is started.
    fn ibv_wr_set_inline_data(
        qp: *mut ibv_qp_ex,
        addr: *mut c_void,
        length: usize,
    ) = wr_set_inline_data;

    /// Copies the data of the started request from several buffers; see [`ibv_wr_set_inline_data`].
    fn ibv_wr_set_inline_data_list(
        qp: *mut ibv_qp_ex,
        num_buf: usize,
        buf_list: *const ibv_data_buf,
    ) = wr_set_inline_data_list;

    /// Sets the memory of the started request.
    fn ibv_wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) = wr_set_sge;

    /// Sets a scatter/gather list as the memory of the started request.
    fn ibv_wr_set_sge_list(
        qp: *mut ibv_qp_ex,
        num_sge: usize,
        sg_list: *const ibv_sge,
    ) = wr_set_sge_list;

    /// Starts a batch of requests. The provider's lock is held until the batch is completed or aborted.
    fn ibv_wr_start(qp: *mut ibv_qp_ex) = wr_start;

    /// Posts the batch. Returns 0, or an errno if nothing was posted.
    fn ibv_wr_complete(qp: *mut ibv_qp_ex) -> c_int = wr_complete;

    /// Aborts the batch.
    fn ibv_wr_abort(qp: *mut ibv_qp_ex) = wr_abort;

    /// Starts an atomic write of 8 bytes (rdma-core 44).
    fn ibv_wr_atomic_write(
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        atomic_wr: *const c_void,
    ) = wr_atomic_write;
}
