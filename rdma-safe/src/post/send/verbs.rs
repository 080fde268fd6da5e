//! The operations that go to a connected queue pair, and to a shared receive queue of the peer.

/// The methods of what has a method `add` with the contract of `SendBatch::add`: a batch, and one that names a queue as well. They
/// have to be in one place, for each says how to make a work request twice, by either interface.
macro_rules! operations {
    () => {
        /// Sends `payload`: `ibv_wr_send`.
        ///
        /// # Errors
        /// [`PostError::NotEnabled`], [`PostError::TooManySges`], [`PostError::InlineTooLong`], [`PostError::BatchFull`];
        /// [`PostError::NoDestination`] on UD queue pairs, and [`PostError::NoRemoteQueue`] on those of XRC, which take their work
        /// by [`SendBatch::to_srq`]; that is [`PostError::NotXrc`] elsewhere. The batch is as before then.
        ///
        /// # Safety
        /// See [`SendBatch`].
        #[doc(alias = "ibv_wr_send")]
        #[inline(always)]
        pub unsafe fn send(&mut self, wr: WorkRequest, payload: impl Payload) -> Result<(), PostError> {
            // SAFETY: the caller's contract; the operation and its builder belong together.
            unsafe { self.add(SendOps::SEND, IBV_WR_SEND, wr, payload, |qp| ibv_wr_send(qp), set_none) }
        }

        /// Sends `payload` with immediate data, given in host byte order: `ibv_wr_send_imm`.
        ///
        /// # Errors
        /// As [`SendBatch::send`].
        ///
        /// # Safety
        /// See [`SendBatch`].
        #[doc(alias = "ibv_wr_send_imm")]
        #[inline(always)]
        pub unsafe fn send_imm(&mut self, wr: WorkRequest, imm: u32, payload: impl Payload) -> Result<(), PostError> {
            let imm = imm.to_be();
            let extended = |qp| {
                // SAFETY: called by `add` as it says.
                unsafe { ibv_wr_send_imm(qp, imm) }
            };
            let classic = |wr: &mut ibv_send_wr| {
                set_none(wr);
                wr.__bindgen_anon_1.imm_data = imm;
            };
            // SAFETY: as in `send`.
            unsafe { self.add(SendOps::SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM, wr, payload, extended, classic) }
        }

        /// Sends `payload` and invalidates a key of the peer: `ibv_wr_send_inv`.
        ///
        /// # Errors
        /// As [`SendBatch::send`].
        ///
        /// # Safety
        /// See [`SendBatch`].
        #[doc(alias = "ibv_wr_send_inv")]
        #[inline(always)]
        pub unsafe fn send_invalidate(
            &mut self,
            wr: WorkRequest,
            rkey: u32,
            payload: impl Payload,
        ) -> Result<(), PostError> {
            let extended = |qp| {
                // SAFETY: called by `add` as it says.
                unsafe { ibv_wr_send_inv(qp, rkey) }
            };
            let classic = |wr: &mut ibv_send_wr| {
                set_none(wr);
                wr.__bindgen_anon_1.invalidate_rkey = rkey;
            };
            // SAFETY: as in `send`.
            unsafe { self.add(SendOps::SEND_WITH_INV, IBV_WR_SEND_WITH_INV, wr, payload, extended, classic) }
        }

        /// Writes `payload` to memory of the peer: `ibv_wr_rdma_write`.
        ///
        /// # Errors
        /// As [`SendBatch::send`].
        ///
        /// # Safety
        /// See [`SendBatch`].
        #[doc(alias = "ibv_wr_rdma_write")]
        #[inline(always)]
        pub unsafe fn write(
            &mut self,
            wr: WorkRequest,
            remote: impl Into<Remote>,
            payload: impl Payload,
        ) -> Result<(), PostError> {
            let Remote { address, rkey } = remote.into();
            let extended = |qp| {
                // SAFETY: called by `add` as it says.
                unsafe { ibv_wr_rdma_write(qp, rkey, address) }
            };
            let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
            // SAFETY: as in `send`.
            unsafe { self.add(SendOps::RDMA_WRITE, IBV_WR_RDMA_WRITE, wr, payload, extended, classic) }
        }

        /// Writes `payload` to memory of the peer and completes a receive there, with immediate data, given in host byte
        /// order: `ibv_wr_rdma_write_imm`.
        ///
        /// # Errors
        /// As [`SendBatch::send`].
        ///
        /// # Safety
        /// See [`SendBatch`].
        #[doc(alias = "ibv_wr_rdma_write_imm")]
        #[inline(always)]
        pub unsafe fn write_imm(
            &mut self,
            wr: WorkRequest,
            remote: impl Into<Remote>,
            imm: u32,
            payload: impl Payload,
        ) -> Result<(), PostError> {
            let Remote { address, rkey } = remote.into();
            let imm = imm.to_be();
            let extended = |qp| {
                // SAFETY: called by `add` as it says.
                unsafe { ibv_wr_rdma_write_imm(qp, rkey, address, imm) }
            };
            let classic = |wr: &mut ibv_send_wr| {
                set_rdma(wr, address, rkey);
                wr.__bindgen_anon_1.imm_data = imm;
            };
            // SAFETY: as in `send`.
            unsafe {
                self.add(SendOps::RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM, wr, payload, extended, classic)
            }
        }

        /// Reads memory of the peer into `target`: `ibv_wr_rdma_read`.
        ///
        /// # Errors
        /// As [`SendBatch::send`].
        ///
        /// # Safety
        /// See [`SendBatch`].
        #[doc(alias = "ibv_wr_rdma_read")]
        #[inline(always)]
        pub unsafe fn read(
            &mut self,
            wr: WorkRequest,
            remote: impl Into<Remote>,
            target: impl Scatter,
        ) -> Result<(), PostError> {
            let Remote { address, rkey } = remote.into();
            let extended = |qp| {
                // SAFETY: called by `add` as it says.
                unsafe { ibv_wr_rdma_read(qp, rkey, address) }
            };
            let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
            // SAFETY: as in `send`.
            unsafe { self.add(SendOps::RDMA_READ, IBV_WR_RDMA_READ, wr, target, extended, classic) }
        }

        /// Replaces the 64-bit word at `remote` by `swap` if it equals `compare`, and puts its old value into the eight bytes
        /// of `result`, in host byte order: `ibv_wr_atomic_cmp_swp`.
        ///
        /// # Errors
        /// As [`SendBatch::send`]; [`PostError::AtomicOperand`].
        ///
        /// # Safety
        /// See [`SendBatch`].
        #[doc(alias = "ibv_wr_atomic_cmp_swp")]
        #[inline(always)]
        pub unsafe fn compare_swap(
            &mut self,
            wr: WorkRequest,
            remote: impl Into<Remote>,
            compare: u64,
            swap: u64,
            result: Sge,
        ) -> Result<(), PostError> {
            let Remote { address, rkey } = remote.into();
            check_atomic(address, result)?;
            let extended = |qp| {
                // SAFETY: called by `add` as it says.
                unsafe { ibv_wr_atomic_cmp_swp(qp, rkey, address, compare, swap) }
            };
            let classic = |wr: &mut ibv_send_wr| set_atomic(wr, address, rkey, compare, swap);
            let (op, opcode) = (SendOps::ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_CMP_AND_SWP);
            // SAFETY: as in `send`.
            unsafe { self.add(op, opcode, wr, result, extended, classic) }
        }

        /// Adds `add` to the 64-bit word at `remote`, and puts its old value into the eight bytes of `result`, in host byte
        /// order: `ibv_wr_atomic_fetch_add`.
        ///
        /// # Errors
        /// As [`SendBatch::send`]; [`PostError::AtomicOperand`].
        ///
        /// # Safety
        /// See [`SendBatch`].
        #[doc(alias = "ibv_wr_atomic_fetch_add")]
        #[inline(always)]
        pub unsafe fn fetch_add(
            &mut self,
            wr: WorkRequest,
            remote: impl Into<Remote>,
            add: u64,
            result: Sge,
        ) -> Result<(), PostError> {
            let Remote { address, rkey } = remote.into();
            check_atomic(address, result)?;
            let extended = |qp| {
                // SAFETY: called by `add` as it says.
                unsafe { ibv_wr_atomic_fetch_add(qp, rkey, address, add) }
            };
            let classic = |wr: &mut ibv_send_wr| set_atomic(wr, address, rkey, add, 0);
            let (op, opcode) = (SendOps::ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD);
            // SAFETY: as in `send`.
            unsafe { self.add(op, opcode, wr, result, extended, classic) }
        }

        /// Completes when what was written to `len` bytes of the peer, at `remote`, has come as far as `placement` says:
        /// `ibv_wr_flush`. Writes before it in this queue are waited for; nothing is transferred.
        ///
        /// Devices that have it report [`DeviceCapabilities::FLUSH_GLOBAL`](crate::DeviceCapabilities::FLUSH_GLOBAL) and
        /// [`FLUSH_PERSISTENT`](crate::DeviceCapabilities::FLUSH_PERSISTENT).
        ///
        /// # Errors
        /// As [`SendBatch::send`]. Work that is posted by `ibv_post_send` does not have it: [`PostError::NotEnabled`].
        #[doc(alias = "ibv_wr_flush")]
        #[inline(always)]
        pub fn flush(
            &mut self,
            wr: WorkRequest,
            remote: impl Into<Remote>,
            len: usize,
            placement: FlushPlacement,
            range: FlushRange,
        ) -> Result<(), PostError> {
            let Remote { address, rkey } = remote.into();
            let extended = |qp| {
                // SAFETY: called by `add` as it says.
                unsafe { ibv_wr_flush(qp, rkey, address, len, placement.bits(), range.0) }
            };
            let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
            // SAFETY: no memory is named here, and none of the peer is written. The operation and its builder belong together. No
            // queue pair that is posted to by `ibv_post_send` has the operation.
            unsafe { self.add(SendOps::FLUSH, IBV_WR_FLUSH, wr, NoData, extended, classic) }
        }
    };
}

pub(super) use operations;
