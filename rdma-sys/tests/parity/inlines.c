/*
 * The C side of the parity test: one exported function c_NAME for each static inline NAME of the headers, and the
 * exported functions that the inlines call, which forward to recorders of the Rust side.
 */

#include <infiniband/ib.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

/* Newer than the headers of the bindings. */
struct ibv_comp_cntr_caps;

/* The order is that of stubs! in recorder.rs. */
static struct {
	struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
	struct ibv_srq *(*create_srq)(struct ibv_pd *, struct ibv_srq_init_attr *);
	int (*query_port)(struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *);
	int (*query_device)(struct ibv_context *, struct ibv_device_attr *);
	int (*query_gid_ex)(struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *, uint32_t, size_t);
	ssize_t (*query_gid_table)(struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t, size_t);
	struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
	struct ibv_mr *(*reg_mr_iova)(struct ibv_pd *, void *, size_t, uint64_t, int);
	struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *, void *, size_t, uint64_t, unsigned int);
	int (*dereg_mr)(struct ibv_mr *);
	int (*get_cq_event)(struct ibv_comp_channel *, struct ibv_cq **, void **);
	void (*ack_cq_events)(struct ibv_cq *, unsigned int);
	int (*query_comp_cntr_caps)(struct ibv_context *, struct ibv_comp_cntr_caps *, size_t);
} stubs;

void parity_install(const void *table)
{
	memcpy(&stubs, table, sizeof(stubs));
}

/* Parentheses around a name keep a macro of that name out. */
struct ibv_qp *(ibv_create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	return stubs.create_qp(pd, attr);
}

struct ibv_srq *(ibv_create_srq)(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	return stubs.create_srq(pd, attr);
}

int (ibv_query_port)(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	return stubs.query_port(context, port, attr);
}

int (ibv_query_device)(struct ibv_context *context, struct ibv_device_attr *attr)
{
	return stubs.query_device(context, attr);
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
		      uint32_t flags, size_t size)
{
	return stubs.query_gid_ex(context, port, index, entry, flags, size);
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max, uint32_t flags,
			     size_t size)
{
	return stubs.query_gid_table(context, entries, max, flags, size);
}

struct ibv_mr *(ibv_reg_mr)(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return stubs.reg_mr(pd, addr, length, access);
}

struct ibv_mr *(ibv_reg_mr_iova)(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return stubs.reg_mr_iova(pd, addr, length, iova, access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	return stubs.reg_mr_iova2(pd, addr, length, iova, access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	return stubs.dereg_mr(mr);
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context)
{
	return stubs.get_cq_event(channel, cq, context);
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int events)
{
	stubs.ack_cq_events(cq, events);
}

int _ibv_query_comp_cntr_caps(struct ibv_context *context, struct ibv_comp_cntr_caps *caps, size_t size)
{
	return stubs.query_comp_cntr_caps(context, caps, size);
}

#define EXPORT(type, name, parameters, arguments) \
	type c_##name parameters { return name arguments; }

/* Returning a void expression is an extension of C that gcc and clang share. */

/* verbs.h: work requests */
EXPORT(void, ibv_wr_atomic_cmp_swp, (struct ibv_qp_ex *q, uint32_t k, uint64_t a, uint64_t c, uint64_t s), (q, k, a, c, s))
EXPORT(void, ibv_wr_atomic_fetch_add, (struct ibv_qp_ex *q, uint32_t k, uint64_t a, uint64_t d), (q, k, a, d))
EXPORT(void, ibv_wr_bind_mw, (struct ibv_qp_ex *q, struct ibv_mw *m, uint32_t k, const struct ibv_mw_bind_info *i), (q, m, k, i))
EXPORT(void, ibv_wr_local_inv, (struct ibv_qp_ex *q, uint32_t k), (q, k))
EXPORT(void, ibv_wr_rdma_read, (struct ibv_qp_ex *q, uint32_t k, uint64_t a), (q, k, a))
EXPORT(void, ibv_wr_rdma_write, (struct ibv_qp_ex *q, uint32_t k, uint64_t a), (q, k, a))
EXPORT(void, ibv_wr_flush, (struct ibv_qp_ex *q, uint32_t k, uint64_t a, size_t n, uint8_t t, uint8_t l), (q, k, a, n, t, l))
EXPORT(void, ibv_wr_rdma_write_imm, (struct ibv_qp_ex *q, uint32_t k, uint64_t a, __be32 i), (q, k, a, i))
EXPORT(void, ibv_wr_send, (struct ibv_qp_ex *q), (q))
EXPORT(void, ibv_wr_send_imm, (struct ibv_qp_ex *q, __be32 i), (q, i))
EXPORT(void, ibv_wr_send_inv, (struct ibv_qp_ex *q, uint32_t k), (q, k))
EXPORT(void, ibv_wr_send_tso, (struct ibv_qp_ex *q, void *h, uint16_t n, uint16_t m), (q, h, n, m))
EXPORT(void, ibv_wr_set_ud_addr, (struct ibv_qp_ex *q, struct ibv_ah *h, uint32_t n, uint32_t k), (q, h, n, k))
EXPORT(void, ibv_wr_set_xrc_srqn, (struct ibv_qp_ex *q, uint32_t n), (q, n))
EXPORT(void, ibv_wr_set_inline_data, (struct ibv_qp_ex *q, void *a, size_t n), (q, a, n))
EXPORT(void, ibv_wr_set_inline_data_list, (struct ibv_qp_ex *q, size_t n, const struct ibv_data_buf *l), (q, n, l))
EXPORT(void, ibv_wr_set_sge, (struct ibv_qp_ex *q, uint32_t k, uint64_t a, uint32_t n), (q, k, a, n))
EXPORT(void, ibv_wr_set_sge_list, (struct ibv_qp_ex *q, size_t n, const struct ibv_sge *l), (q, n, l))
EXPORT(void, ibv_wr_start, (struct ibv_qp_ex *q), (q))
EXPORT(int, ibv_wr_complete, (struct ibv_qp_ex *q), (q))
EXPORT(void, ibv_wr_abort, (struct ibv_qp_ex *q), (q))
EXPORT(void, ibv_wr_atomic_write, (struct ibv_qp_ex *q, uint32_t k, uint64_t a, const void *d), (q, k, a, d))

/* verbs.h: completion queues */
EXPORT(struct ibv_cq *, ibv_cq_ex_to_cq, (struct ibv_cq_ex *c), (c))
EXPORT(int, ibv_start_poll, (struct ibv_cq_ex *c, struct ibv_poll_cq_attr *a), (c, a))
EXPORT(int, ibv_next_poll, (struct ibv_cq_ex *c), (c))
EXPORT(void, ibv_end_poll, (struct ibv_cq_ex *c), (c))
EXPORT(enum ibv_wc_opcode, ibv_wc_read_opcode, (struct ibv_cq_ex *c), (c))
EXPORT(uint32_t, ibv_wc_read_vendor_err, (struct ibv_cq_ex *c), (c))
EXPORT(uint32_t, ibv_wc_read_byte_len, (struct ibv_cq_ex *c), (c))
EXPORT(__be32, ibv_wc_read_imm_data, (struct ibv_cq_ex *c), (c))
EXPORT(uint32_t, ibv_wc_read_invalidated_rkey, (struct ibv_cq_ex *c), (c))
EXPORT(uint32_t, ibv_wc_read_qp_num, (struct ibv_cq_ex *c), (c))
EXPORT(uint32_t, ibv_wc_read_src_qp, (struct ibv_cq_ex *c), (c))
EXPORT(unsigned int, ibv_wc_read_wc_flags, (struct ibv_cq_ex *c), (c))
EXPORT(uint32_t, ibv_wc_read_slid, (struct ibv_cq_ex *c), (c))
EXPORT(uint8_t, ibv_wc_read_sl, (struct ibv_cq_ex *c), (c))
EXPORT(uint8_t, ibv_wc_read_dlid_path_bits, (struct ibv_cq_ex *c), (c))
EXPORT(uint64_t, ibv_wc_read_completion_ts, (struct ibv_cq_ex *c), (c))
EXPORT(uint64_t, ibv_wc_read_completion_wallclock_ns, (struct ibv_cq_ex *c), (c))
EXPORT(uint16_t, ibv_wc_read_cvlan, (struct ibv_cq_ex *c), (c))
EXPORT(uint32_t, ibv_wc_read_flow_tag, (struct ibv_cq_ex *c), (c))
EXPORT(void, ibv_wc_read_tm_info, (struct ibv_cq_ex *c, struct ibv_wc_tm_info *i), (c, i))
EXPORT(struct ibv_cq_ex *, ibv_create_cq_ex, (struct ibv_context *c, struct ibv_cq_init_attr_ex *a), (c, a))
EXPORT(int, ibv_poll_cq, (struct ibv_cq *c, int n, struct ibv_wc *w), (c, n, w))
EXPORT(int, ibv_req_notify_cq, (struct ibv_cq *c, int s), (c, s))
EXPORT(int, ibv_modify_cq, (struct ibv_cq *c, struct ibv_modify_cq_attr *a), (c, a))

/* verbs.h: queries */
EXPORT(struct verbs_context *, verbs_get_ctx, (struct ibv_context *c), (c))
EXPORT(int, ___ibv_query_port, (struct ibv_context *c, uint8_t p, struct ibv_port_attr *a), (c, p, a))
EXPORT(int, ibv_query_gid_ex, (struct ibv_context *c, uint32_t p, uint32_t i, struct ibv_gid_entry *e, uint32_t f), (c, p, i, e, f))
EXPORT(ssize_t, ibv_query_gid_table, (struct ibv_context *c, struct ibv_gid_entry *e, size_t n, uint32_t f), (c, e, n, f))
EXPORT(int, ibv_query_rt_values_ex, (struct ibv_context *c, struct ibv_values_ex *v), (c, v))
EXPORT(int, ibv_query_device_ex, (struct ibv_context *c, const struct ibv_query_device_ex_input *i, struct ibv_device_attr_ex *a), (c, i, a))

/* verbs.h: flow steering and counters */
EXPORT(struct ibv_flow *, ibv_create_flow, (struct ibv_qp *q, struct ibv_flow_attr *a), (q, a))
EXPORT(int, ibv_destroy_flow, (struct ibv_flow *f), (f))
EXPORT(struct ibv_flow_action *, ibv_create_flow_action_esp, (struct ibv_context *c, struct ibv_flow_action_esp_attr *a), (c, a))
EXPORT(int, ibv_modify_flow_action_esp, (struct ibv_flow_action *f, struct ibv_flow_action_esp_attr *a), (f, a))
EXPORT(int, ibv_destroy_flow_action, (struct ibv_flow_action *f), (f))
EXPORT(struct ibv_counters *, ibv_create_counters, (struct ibv_context *c, struct ibv_counters_init_attr *a), (c, a))
EXPORT(int, ibv_destroy_counters, (struct ibv_counters *c), (c))
EXPORT(int, ibv_attach_counters_point_flow, (struct ibv_counters *c, struct ibv_counter_attach_attr *a, struct ibv_flow *f), (c, a, f))
EXPORT(int, ibv_read_counters, (struct ibv_counters *c, uint64_t *v, uint32_t n, uint32_t f), (c, v, n, f))

/* verbs.h: memory */
EXPORT(struct ibv_mr *, __ibv_reg_mr, (struct ibv_pd *p, void *a, size_t n, unsigned int f, int c), (p, a, n, f, c))
EXPORT(struct ibv_mr *, __ibv_reg_mr_iova, (struct ibv_pd *p, void *a, size_t n, uint64_t i, unsigned int f, int c), (p, a, n, i, f, c))
EXPORT(struct ibv_mw *, ibv_alloc_mw, (struct ibv_pd *p, enum ibv_mw_type t), (p, t))
EXPORT(int, ibv_dealloc_mw, (struct ibv_mw *m), (m))
EXPORT(uint32_t, ibv_inc_rkey, (uint32_t k), (k))
EXPORT(int, ibv_bind_mw, (struct ibv_qp *q, struct ibv_mw *m, struct ibv_mw_bind *b), (q, m, b))
EXPORT(int, ibv_advise_mr, (struct ibv_pd *p, enum ibv_advise_mr_advice a, uint32_t f, struct ibv_sge *s, uint32_t n), (p, a, f, s, n))
EXPORT(struct ibv_dm *, ibv_alloc_dm, (struct ibv_context *c, struct ibv_alloc_dm_attr *a), (c, a))
EXPORT(int, ibv_free_dm, (struct ibv_dm *d), (d))
EXPORT(int, ibv_memcpy_to_dm, (struct ibv_dm *d, uint64_t o, const void *h, size_t n), (d, o, h, n))
EXPORT(int, ibv_memcpy_from_dm, (void *h, struct ibv_dm *d, uint64_t o, size_t n), (h, d, o, n))
EXPORT(struct ibv_mr *, ibv_alloc_null_mr, (struct ibv_pd *p), (p))
EXPORT(struct ibv_mr *, ibv_reg_dm_mr, (struct ibv_pd *p, struct ibv_dm *d, uint64_t o, size_t n, unsigned int f), (p, d, o, n, f))

/* The macros, called with flags that the compiler does not know. */
struct ibv_mr *c_ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr(pd, addr, length, access);
}

struct ibv_mr *c_ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return ibv_reg_mr_iova(pd, addr, length, iova, access);
}

int c_ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr)
{
	return ibv_query_port(context, port, attr);
}

/* verbs.h: domains, queues */
EXPORT(struct ibv_xrcd *, ibv_open_xrcd, (struct ibv_context *c, struct ibv_xrcd_init_attr *a), (c, a))
EXPORT(int, ibv_close_xrcd, (struct ibv_xrcd *x), (x))
EXPORT(struct ibv_td *, ibv_alloc_td, (struct ibv_context *c, struct ibv_td_init_attr *a), (c, a))
EXPORT(int, ibv_dealloc_td, (struct ibv_td *t), (t))
EXPORT(struct ibv_pd *, ibv_alloc_parent_domain, (struct ibv_context *c, struct ibv_parent_domain_init_attr *a), (c, a))
EXPORT(struct ibv_srq *, ibv_create_srq_ex, (struct ibv_context *c, struct ibv_srq_init_attr_ex *a), (c, a))
EXPORT(int, ibv_get_srq_num, (struct ibv_srq *s, uint32_t *n), (s, n))
EXPORT(int, ibv_post_srq_recv, (struct ibv_srq *s, struct ibv_recv_wr *w, struct ibv_recv_wr **b), (s, w, b))
EXPORT(int, ibv_post_srq_ops, (struct ibv_srq *s, struct ibv_ops_wr *o, struct ibv_ops_wr **b), (s, o, b))
EXPORT(struct ibv_qp *, ibv_create_qp_ex, (struct ibv_context *c, struct ibv_qp_init_attr_ex *a), (c, a))
EXPORT(struct ibv_qp *, ibv_open_qp, (struct ibv_context *c, struct ibv_qp_open_attr *a), (c, a))
EXPORT(int, ibv_modify_qp_rate_limit, (struct ibv_qp *q, struct ibv_qp_rate_limit_attr *a), (q, a))
EXPORT(int, ibv_post_send, (struct ibv_qp *q, struct ibv_send_wr *w, struct ibv_send_wr **b), (q, w, b))
EXPORT(int, ibv_post_recv, (struct ibv_qp *q, struct ibv_recv_wr *w, struct ibv_recv_wr **b), (q, w, b))
EXPORT(int, ibv_is_qpt_supported, (uint32_t c, enum ibv_qp_type t), (c, t))
EXPORT(uint16_t, ibv_flow_label_to_udp_sport, (uint32_t l), (l))
EXPORT(int, ibv_post_wq_recv, (struct ibv_wq *q, struct ibv_recv_wr *w, struct ibv_recv_wr **b), (q, w, b))
EXPORT(struct ibv_wq *, ibv_create_wq, (struct ibv_context *c, struct ibv_wq_init_attr *a), (c, a))
EXPORT(int, ibv_modify_wq, (struct ibv_wq *q, struct ibv_wq_attr *a), (q, a))
EXPORT(int, ibv_destroy_wq, (struct ibv_wq *q), (q))
EXPORT(struct ibv_rwq_ind_table *, ibv_create_rwq_ind_table, (struct ibv_context *c, struct ibv_rwq_ind_table_init_attr *a), (c, a))
EXPORT(int, ibv_destroy_rwq_ind_table, (struct ibv_rwq_ind_table *t), (t))

/* rdma_verbs.h */
EXPORT(int, rdma_seterrno, (int r), (r))
EXPORT(struct ibv_mr *, rdma_reg_msgs, (struct rdma_cm_id *i, void *a, size_t n), (i, a, n))
EXPORT(struct ibv_mr *, rdma_reg_read, (struct rdma_cm_id *i, void *a, size_t n), (i, a, n))
EXPORT(struct ibv_mr *, rdma_reg_write, (struct rdma_cm_id *i, void *a, size_t n), (i, a, n))
EXPORT(int, rdma_dereg_mr, (struct ibv_mr *m), (m))
EXPORT(int, rdma_post_recvv, (struct rdma_cm_id *i, void *c, struct ibv_sge *s, int n), (i, c, s, n))
EXPORT(int, rdma_post_sendv, (struct rdma_cm_id *i, void *c, struct ibv_sge *s, int n, int f), (i, c, s, n, f))
EXPORT(int, rdma_post_readv, (struct rdma_cm_id *i, void *c, struct ibv_sge *s, int n, int f, uint64_t a, uint32_t k), (i, c, s, n, f, a, k))
EXPORT(int, rdma_post_writev, (struct rdma_cm_id *i, void *c, struct ibv_sge *s, int n, int f, uint64_t a, uint32_t k), (i, c, s, n, f, a, k))
EXPORT(int, rdma_post_recv, (struct rdma_cm_id *i, void *c, void *p, size_t n, struct ibv_mr *m), (i, c, p, n, m))
EXPORT(int, rdma_post_send, (struct rdma_cm_id *i, void *c, void *p, size_t n, struct ibv_mr *m, int f), (i, c, p, n, m, f))
EXPORT(int, rdma_post_read, (struct rdma_cm_id *i, void *c, void *p, size_t n, struct ibv_mr *m, int f, uint64_t a, uint32_t k), (i, c, p, n, m, f, a, k))
EXPORT(int, rdma_post_write, (struct rdma_cm_id *i, void *c, void *p, size_t n, struct ibv_mr *m, int f, uint64_t a, uint32_t k), (i, c, p, n, m, f, a, k))
EXPORT(int, rdma_post_ud_send, (struct rdma_cm_id *i, void *c, void *p, size_t n, struct ibv_mr *m, int f, struct ibv_ah *h, uint32_t q), (i, c, p, n, m, f, h, q))
EXPORT(int, rdma_get_send_comp, (struct rdma_cm_id *i, struct ibv_wc *w), (i, w))
EXPORT(int, rdma_get_recv_comp, (struct rdma_cm_id *i, struct ibv_wc *w), (i, w))

/* rdma_cma.h */
EXPORT(struct sockaddr *, rdma_get_local_addr, (struct rdma_cm_id *i), (i))
EXPORT(struct sockaddr *, rdma_get_peer_addr, (struct rdma_cm_id *i), (i))

/* ib.h */
EXPORT(int, ib_addr_any, (const struct ib_addr *a), (a))
EXPORT(int, ib_addr_loopback, (const struct ib_addr *a), (a))
EXPORT(void, ib_addr_set, (struct ib_addr *a, __be32 w1, __be32 w2, __be32 w3, __be32 w4), (a, w1, w2, w3, w4))
EXPORT(int, ib_addr_cmp, (const struct ib_addr *a, const struct ib_addr *b), (a, b))

#ifdef PARITY_COMP_CNTR
EXPORT(int, ibv_query_comp_cntr_caps, (struct ibv_context *c, struct ibv_comp_cntr_caps *a), (c, a))
#endif
