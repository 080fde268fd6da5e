/* The reference loops in C, over the inline functions of verbs.h. Each runs `n` operations and returns a checksum of the
   fields that it read, or FAILED if a verb fails. */

#include <stdint.h>
#include <infiniband/verbs.h>

#define FAILED UINT64_MAX
#define BATCH 16
#define INLINE 32

/* Same layout as `Objects` in src/rig.rs. */
struct objects {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_qp *qp;
	struct ibv_qp_ex *qp_ex;
	struct ibv_cq *cq;
	struct ibv_cq_ex *cq_ex;
	struct ibv_ah *ah;
	struct ibv_srq *srq;
	uint64_t local;
	uint64_t remote;
	uint32_t lkey;
	uint32_t rkey;
	uint32_t len;
	uint32_t qp_num;
	uint32_t qkey;
	int (*destroy_qp)(struct ibv_qp *);
	struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
	int (*dereg_mr)(struct ibv_mr *);
};

/* Takes all available completions. Fails if there is none. */
#define DRAIN_EX(cq, sum)                                                                                                   \
	do {                                                                                                               \
		struct ibv_poll_cq_attr attr = {0};                                                                        \
		if (ibv_start_poll(cq, &attr))                                                                             \
			return FAILED;                                                                                     \
		do                                                                                                         \
			sum += cq->wr_id + cq->status + ibv_wc_read_opcode(cq);                                            \
		while (!ibv_next_poll(cq));                                                                                \
		ibv_end_poll(cq);                                                                                          \
	} while (0)

#define DRAIN_CL(cq, wc, sum)                                                                                               \
	do {                                                                                                               \
		int taken = ibv_poll_cq(cq, BATCH, wc);                                                                    \
		if (taken <= 0)                                                                                            \
			return FAILED;                                                                                     \
		for (int j = 0; j < taken; j++)                                                                            \
			sum += wc[j].wr_id + wc[j].status + wc[j].opcode;                                                  \
	} while (0)

/* Posts a signaled work request with one scatter/gather element and takes its completion. */
#define POST_AND_POLL(name, build)                                                                                          \
	uint64_t loop_##name(struct objects *o, uint64_t n)                                                                \
	{                                                                                                                  \
		struct ibv_qp_ex *qp = o->qp_ex;                                                                           \
		struct ibv_cq_ex *cq = o->cq_ex;                                                                           \
		uint64_t remote = o->remote, local = o->local, sum = 0;                                                    \
		uint32_t rkey = o->rkey, lkey = o->lkey, len = o->len;                                                     \
		(void)remote, (void)rkey;                                                                                  \
		struct ibv_ah *ah = o->ah;                                                                                 \
		uint32_t qp_num = o->qp_num, qkey = o->qkey;                                                               \
		(void)ah, (void)qp_num, (void)qkey;                                                                        \
		for (uint64_t i = 0; i < n; i++) {                                                                         \
			ibv_wr_start(qp);                                                                                  \
			qp->wr_id = i;                                                                                     \
			qp->wr_flags = IBV_SEND_SIGNALED;                                                                  \
			build;                                                                                             \
			ibv_wr_set_sge(qp, lkey, local, len);                                                              \
			if (ibv_wr_complete(qp))                                                                           \
				return FAILED;                                                                             \
			DRAIN_EX(cq, sum);                                                                                 \
		}                                                                                                          \
		return sum;                                                                                                \
	}

POST_AND_POLL(ex1, ibv_wr_rdma_write(qp, rkey, remote))
POST_AND_POLL(read, ibv_wr_rdma_read(qp, rkey, remote))
POST_AND_POLL(write_imm, ibv_wr_rdma_write_imm(qp, rkey, remote, htobe32(i)))
POST_AND_POLL(send_inv, ibv_wr_send_inv(qp, rkey))
POST_AND_POLL(fetch_add, ibv_wr_atomic_fetch_add(qp, rkey, remote, i))

/* Binds a memory window. The stub accesses neither the window nor the region. */
uint64_t loop_bind_mw(struct objects *o, uint64_t n)
{
	struct ibv_qp_ex *qp = o->qp_ex;
	struct ibv_cq_ex *cq = o->cq_ex;
	struct ibv_mw_bind_info info = {.addr = o->local, .length = o->len, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
	uint32_t rkey = o->rkey;
	uint64_t sum = 0;
	for (uint64_t i = 0; i < n; i++) {
		ibv_wr_start(qp);
		qp->wr_id = i;
		qp->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_bind_mw(qp, NULL, rkey, &info);
		if (ibv_wr_complete(qp))
			return FAILED;
		DRAIN_EX(cq, sum);
	}
	return sum;
}
POST_AND_POLL(ud_send, ibv_wr_send(qp); ibv_wr_set_ud_addr(qp, ah, qp_num, qkey))

#define BATCH_AND_POLL(name, build)                                                                                         \
	uint64_t loop_##name(struct objects *o, uint64_t n)                                                                \
	{                                                                                                                  \
		struct ibv_qp_ex *qp = o->qp_ex;                                                                           \
		struct ibv_cq_ex *cq = o->cq_ex;                                                                           \
		uint64_t remote = o->remote, local = o->local, sum = 0;                                                    \
		uint32_t rkey = o->rkey, lkey = o->lkey, len = o->len;                                                     \
		for (uint64_t i = 0; i < n; i += BATCH) {                                                                  \
			ibv_wr_start(qp);                                                                                  \
			for (uint64_t j = 0; j < BATCH; j++) {                                                             \
				qp->wr_id = i + j;                                                                         \
				qp->wr_flags = IBV_SEND_SIGNALED;                                                          \
				build;                                                                                     \
				ibv_wr_set_sge(qp, lkey, local, len);                                                      \
			}                                                                                                  \
			if (ibv_wr_complete(qp))                                                                           \
				return FAILED;                                                                             \
			DRAIN_EX(cq, sum);                                                                                 \
		}                                                                                                          \
		return sum;                                                                                                \
	}

BATCH_AND_POLL(ex16, ibv_wr_rdma_write(qp, rkey, remote))

#define CLASSIC(name, ...)                                                                                                  \
	uint64_t loop_##name(struct objects *o, uint64_t n)                                                                \
	{                                                                                                                  \
		struct ibv_qp *qp = o->qp;                                                                                 \
		struct ibv_cq *cq = o->cq;                                                                                 \
		uint64_t remote = o->remote, local = o->local;                                                             \
		uint32_t rkey = o->rkey, lkey = o->lkey, len = o->len;                                                     \
		struct ibv_ah *ah = o->ah;                                                                                 \
		uint32_t qp_num = o->qp_num, qkey = o->qkey;                                                               \
		(void)remote, (void)rkey, (void)ah, (void)qp_num, (void)qkey;                                              \
		struct ibv_wc wc[BATCH];                                                                                   \
		uint64_t sum = 0;                                                                                          \
		for (uint64_t i = 0; i < n; i++) {                                                                         \
			struct ibv_sge sge = {.addr = local, .length = len, .lkey = lkey};                        \
			struct ibv_send_wr wr = {                                                                          \
				.wr_id = i,                                                                                \
				.sg_list = &sge,                                                                           \
				.num_sge = 1,                                                                              \
				.send_flags = IBV_SEND_SIGNALED,                                                           \
				__VA_ARGS__,                                                                               \
			}, *bad;                                                                                           \
			if (ibv_post_send(qp, &wr, &bad))                                                                  \
				return FAILED;                                                                             \
			DRAIN_CL(cq, wc, sum);                                                                             \
		}                                                                                                          \
		return sum;                                                                                                \
	}

#define WRITE .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = {.remote_addr = remote, .rkey = rkey}

CLASSIC(cl1, WRITE)
CLASSIC(ud_send_cl, .opcode = IBV_WR_SEND, .wr.ud = {.ah = ah, .remote_qpn = qp_num, .remote_qkey = qkey})

#define CLASSIC_BATCH(name, ...)                                                                                            \
	uint64_t loop_##name(struct objects *o, uint64_t n)                                                                \
	{                                                                                                                  \
		struct ibv_qp *qp = o->qp;                                                                                 \
		struct ibv_cq *cq = o->cq;                                                                                 \
		uint64_t remote = o->remote, local = o->local;                                                             \
		uint32_t rkey = o->rkey, lkey = o->lkey, len = o->len;                                                     \
		struct ibv_wc wc[BATCH];                                                                                   \
		struct ibv_sge sge[BATCH];                                                                                 \
		struct ibv_send_wr wr[BATCH], *bad;                                                                        \
		uint64_t sum = 0;                                                                                          \
		for (uint64_t i = 0; i < n; i += BATCH) {                                                                  \
			for (uint64_t j = 0; j < BATCH; j++) {                                                             \
				sge[j] = (struct ibv_sge){.addr = local, .length = len, .lkey = lkey};            \
				wr[j] = (struct ibv_send_wr){                                                              \
					.wr_id = i + j,                                                                    \
					.next = j + 1 < BATCH ? &wr[j + 1] : NULL,                                         \
					.sg_list = &sge[j],                                                                \
					.num_sge = 1,                                                                      \
					.send_flags = IBV_SEND_SIGNALED,                                                   \
					__VA_ARGS__,                                                                       \
				};                                                                                         \
			}                                                                                                  \
			if (ibv_post_send(qp, wr, &bad))                                                                   \
				return FAILED;                                                                             \
			DRAIN_CL(cq, wc, sum);                                                                             \
		}                                                                                                          \
		return sum;                                                                                                \
	}

CLASSIC_BATCH(cl16, WRITE)

#define RECEIVE(name, type, member, post)                                                                                  \
	uint64_t loop_##name(struct objects *o, uint64_t n)                                                                \
	{                                                                                                                  \
		struct type *queue = o->member;                                                                            \
		uint64_t local = o->local;                                                                                 \
		uint32_t lkey = o->lkey, len = o->len;                                                                     \
		for (uint64_t i = 0; i < n; i++) {                                                                         \
			struct ibv_sge sge = {.addr = local, .length = len, .lkey = lkey};                                 \
			struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;                         \
			if (post(queue, &wr, &bad))                                                                        \
				return FAILED;                                                                             \
		}                                                                                                          \
		return n;                                                                                                  \
	}

#define RECEIVE_BATCH(name, type, member, post)                                                                            \
	uint64_t loop_##name(struct objects *o, uint64_t n)                                                                \
	{                                                                                                                  \
		struct type *queue = o->member;                                                                            \
		uint64_t local = o->local;                                                                                 \
		uint32_t lkey = o->lkey, len = o->len;                                                                     \
		struct ibv_sge sge[BATCH];                                                                                 \
		struct ibv_recv_wr wr[BATCH], *bad;                                                                        \
		for (uint64_t i = 0; i < n; i += BATCH) {                                                                  \
			for (uint64_t j = 0; j < BATCH; j++) {                                                             \
				sge[j] = (struct ibv_sge){.addr = local, .length = len, .lkey = lkey};                     \
				wr[j] = (struct ibv_recv_wr){                                                              \
					.wr_id = i + j,                                                                    \
					.next = j + 1 < BATCH ? &wr[j + 1] : NULL,                                         \
					.sg_list = &sge[j],                                                                \
					.num_sge = 1,                                                                      \
				};                                                                                         \
			}                                                                                                  \
			if (post(queue, wr, &bad))                                                                         \
				return FAILED;                                                                             \
		}                                                                                                          \
		return n;                                                                                                  \
	}

RECEIVE(rv1, ibv_qp, qp, ibv_post_recv)
RECEIVE(srq_rv1, ibv_srq, srq, ibv_post_srq_recv)
RECEIVE_BATCH(rv16, ibv_qp, qp, ibv_post_recv)
RECEIVE_BATCH(srq_rv16, ibv_srq, srq, ibv_post_srq_recv)

uint64_t loop_in1(struct objects *o, uint64_t n)
{
	struct ibv_qp_ex *qp = o->qp_ex;
	void *data = (void *)(uintptr_t)o->local;
	for (uint64_t i = 0; i < n; i++) {
		ibv_wr_start(qp);
		qp->wr_id = i;
		qp->wr_flags = IBV_SEND_INLINE;
		ibv_wr_send(qp);
		ibv_wr_set_inline_data(qp, data, INLINE);
		if (ibv_wr_complete(qp))
			return FAILED;
	}
	return n;
}

uint64_t loop_em_ex(struct objects *o, uint64_t n)
{
	struct ibv_cq_ex *cq = o->cq_ex;
	for (uint64_t i = 0; i < n; i++) {
		struct ibv_poll_cq_attr attr = {0};
		if (ibv_start_poll(cq, &attr) != ENOENT)
			return FAILED;
	}
	return n;
}

uint64_t loop_em_cl(struct objects *o, uint64_t n)
{
	struct ibv_cq *cq = o->cq;
	struct ibv_wc wc[BATCH];
	for (uint64_t i = 0; i < n; i++)
		if (ibv_poll_cq(cq, BATCH, wc))
			return FAILED;
	return n;
}

uint64_t loop_poll_ex(struct objects *o, uint64_t n)
{
	struct ibv_cq_ex *cq = o->cq_ex;
	uint64_t sum = 0;
	for (uint64_t i = 0; i < n; i += BATCH) {
		struct ibv_poll_cq_attr attr = {0};
		if (ibv_start_poll(cq, &attr))
			return FAILED;
		do {
			sum += cq->wr_id + cq->status + ibv_wc_read_opcode(cq) + ibv_wc_read_byte_len(cq);
			if (ibv_wc_read_wc_flags(cq) & IBV_WC_WITH_IMM)
				sum += be32toh(ibv_wc_read_imm_data(cq));
		} while (!ibv_next_poll(cq));
		ibv_end_poll(cq);
	}
	return sum;
}

uint64_t loop_poll_cl(struct objects *o, uint64_t n)
{
	struct ibv_cq *cq = o->cq;
	struct ibv_wc wc[BATCH];
	uint64_t sum = 0;
	for (uint64_t i = 0; i < n; i += BATCH) {
		int taken;
		while ((taken = ibv_poll_cq(cq, BATCH, wc)) > 0) {
			for (int j = 0; j < taken; j++) {
				sum += wc[j].wr_id + wc[j].status + wc[j].opcode + wc[j].byte_len;
				if (wc[j].wc_flags & IBV_WC_WITH_IMM)
					sum += be32toh(wc[j].imm_data);
			}
		}
	}
	return sum;
}

uint64_t loop_all_ex(struct objects *o, uint64_t n)
{
	struct ibv_cq_ex *cq = o->cq_ex;
	uint64_t sum = 0;
	for (uint64_t i = 0; i < n; i += BATCH) {
		struct ibv_poll_cq_attr attr = {0};
		if (ibv_start_poll(cq, &attr))
			return FAILED;
		do {
			sum += cq->wr_id + cq->status + ibv_wc_read_opcode(cq) + ibv_wc_read_byte_len(cq);
			if (ibv_wc_read_wc_flags(cq) & IBV_WC_WITH_IMM)
				sum += be32toh(ibv_wc_read_imm_data(cq));
			sum += (uint64_t)ibv_wc_read_vendor_err(cq) + ibv_wc_read_qp_num(cq) + ibv_wc_read_src_qp(cq);
			sum += (uint64_t)ibv_wc_read_slid(cq) + ibv_wc_read_sl(cq) + ibv_wc_read_dlid_path_bits(cq);
		} while (!ibv_next_poll(cq));
		ibv_end_poll(cq);
	}
	return sum;
}

uint64_t loop_all_cl(struct objects *o, uint64_t n)
{
	struct ibv_cq *cq = o->cq;
	struct ibv_wc wc[BATCH];
	uint64_t sum = 0;
	for (uint64_t i = 0; i < n; i += BATCH) {
		int taken;
		while ((taken = ibv_poll_cq(cq, BATCH, wc)) > 0) {
			for (int j = 0; j < taken; j++) {
				sum += wc[j].wr_id + wc[j].status + wc[j].opcode + wc[j].byte_len;
				if (wc[j].wc_flags & IBV_WC_WITH_IMM)
					sum += be32toh(wc[j].imm_data);
				sum += (uint64_t)wc[j].vendor_err + wc[j].qp_num + wc[j].src_qp;
				sum += (uint64_t)wc[j].slid + wc[j].sl + wc[j].dlid_path_bits;
			}
		}
	}
	return sum;
}

/* Buffer hand-over: `wr_id` is the address of the buffer, which is posted again after its completion. */

uint64_t loop_send_ex1(struct objects *o, uint64_t n)
{
	struct ibv_qp_ex *qp = o->qp_ex;
	struct ibv_cq_ex *cq = o->cq_ex;
	uint64_t buffer = o->local, sum = 0;
	uint32_t lkey = o->lkey, len = o->len;
	for (uint64_t i = 0; i < n; i++) {
		struct ibv_poll_cq_attr attr = {0};
		ibv_wr_start(qp);
		qp->wr_id = buffer;
		qp->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(qp);
		ibv_wr_set_sge(qp, lkey, buffer, len);
		if (ibv_wr_complete(qp) || ibv_start_poll(cq, &attr))
			return FAILED;
		do {
			buffer = cq->wr_id;
			sum += cq->status + 1;
		} while (!ibv_next_poll(cq));
		ibv_end_poll(cq);
	}
	return buffer == o->local ? sum : FAILED;
}

uint64_t loop_send_cl1(struct objects *o, uint64_t n)
{
	struct ibv_qp *qp = o->qp;
	struct ibv_cq *cq = o->cq;
	struct ibv_wc wc[BATCH];
	uint64_t buffer = o->local, sum = 0;
	uint32_t lkey = o->lkey, len = o->len;
	for (uint64_t i = 0; i < n; i++) {
		struct ibv_sge sge = {.addr = buffer, .length = len, .lkey = lkey};
		struct ibv_send_wr wr = {
			.wr_id = buffer,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_SEND,
			.send_flags = IBV_SEND_SIGNALED,
		}, *bad;
		if (ibv_post_send(qp, &wr, &bad))
			return FAILED;
		int taken = ibv_poll_cq(cq, BATCH, wc);
		for (int j = 0; j < taken; j++) {
			buffer = wc[j].wr_id;
			sum += wc[j].status + 1;
		}
	}
	return buffer == o->local ? sum : FAILED;
}

uint64_t loop_send_ex16(struct objects *o, uint64_t n)
{
	struct ibv_qp_ex *qp = o->qp_ex;
	struct ibv_cq_ex *cq = o->cq_ex;
	uint64_t buffers[BATCH], sum = 0;
	uint32_t lkey = o->lkey, len = o->len;
	for (int j = 0; j < BATCH; j++)
		buffers[j] = o->local + j * len;
	for (uint64_t i = 0; i < n; i += BATCH) {
		struct ibv_poll_cq_attr attr = {0};
		unsigned int done = 0;
		ibv_wr_start(qp);
		for (int j = 0; j < BATCH; j++) {
			qp->wr_id = buffers[j];
			qp->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_send(qp);
			ibv_wr_set_sge(qp, lkey, buffers[j], len);
		}
		if (ibv_wr_complete(qp) || ibv_start_poll(cq, &attr))
			return FAILED;
		do {
			buffers[done++ % BATCH] = cq->wr_id;
			sum += cq->status + 1;
		} while (!ibv_next_poll(cq));
		ibv_end_poll(cq);
	}
	return buffers[0] == o->local ? sum : FAILED;
}

uint64_t loop_send_cl16(struct objects *o, uint64_t n)
{
	struct ibv_qp *qp = o->qp;
	struct ibv_cq *cq = o->cq;
	struct ibv_wc wc[BATCH];
	struct ibv_sge sge[BATCH];
	struct ibv_send_wr wr[BATCH], *bad;
	uint64_t buffers[BATCH], sum = 0;
	uint32_t lkey = o->lkey, len = o->len;
	for (int j = 0; j < BATCH; j++)
		buffers[j] = o->local + j * len;
	for (uint64_t i = 0; i < n; i += BATCH) {
		for (int j = 0; j < BATCH; j++) {
			sge[j] = (struct ibv_sge){.addr = buffers[j], .length = len, .lkey = lkey};
			wr[j] = (struct ibv_send_wr){
				.wr_id = buffers[j],
				.next = j + 1 < BATCH ? &wr[j + 1] : NULL,
				.sg_list = &sge[j],
				.num_sge = 1,
				.opcode = IBV_WR_SEND,
				.send_flags = IBV_SEND_SIGNALED,
			};
		}
		if (ibv_post_send(qp, wr, &bad))
			return FAILED;
		int taken = ibv_poll_cq(cq, BATCH, wc);
		for (int j = 0; j < taken; j++) {
			buffers[j] = wc[j].wr_id;
			sum += wc[j].status + 1;
		}
	}
	return buffers[0] == o->local ? sum : FAILED;
}

uint64_t loop_recv_ex1(struct objects *o, uint64_t n)
{
	struct ibv_qp *qp = o->qp;
	struct ibv_cq_ex *cq = o->cq_ex;
	uint64_t buffer = o->local, sum = 0;
	uint32_t lkey = o->lkey, len = o->len;
	for (uint64_t i = 0; i < n; i++) {
		struct ibv_sge sge = {.addr = buffer, .length = len, .lkey = lkey};
		struct ibv_recv_wr wr = {.wr_id = buffer, .sg_list = &sge, .num_sge = 1}, *bad;
		struct ibv_poll_cq_attr attr = {0};
		if (ibv_post_recv(qp, &wr, &bad) || ibv_start_poll(cq, &attr))
			return FAILED;
		do {
			buffer = cq->wr_id;
			sum += cq->status + (ibv_wc_read_opcode(cq) == IBV_WC_RECV) + ibv_wc_read_byte_len(cq);
			if (ibv_wc_read_wc_flags(cq) & IBV_WC_WITH_IMM)
				sum += be32toh(ibv_wc_read_imm_data(cq));
		} while (!ibv_next_poll(cq));
		ibv_end_poll(cq);
	}
	return buffer == o->local ? sum : FAILED;
}

uint64_t loop_recv_cl1(struct objects *o, uint64_t n)
{
	struct ibv_qp *qp = o->qp;
	struct ibv_cq *cq = o->cq;
	struct ibv_wc wc[BATCH];
	uint64_t buffer = o->local, sum = 0;
	uint32_t lkey = o->lkey, len = o->len;
	for (uint64_t i = 0; i < n; i++) {
		struct ibv_sge sge = {.addr = buffer, .length = len, .lkey = lkey};
		struct ibv_recv_wr wr = {.wr_id = buffer, .sg_list = &sge, .num_sge = 1}, *bad;
		if (ibv_post_recv(qp, &wr, &bad))
			return FAILED;
		int taken = ibv_poll_cq(cq, BATCH, wc);
		for (int j = 0; j < taken; j++) {
			buffer = wc[j].wr_id;
			sum += wc[j].status + (wc[j].opcode == IBV_WC_RECV) + wc[j].byte_len;
			if (wc[j].wc_flags & IBV_WC_WITH_IMM)
				sum += be32toh(wc[j].imm_data);
		}
	}
	return buffer == o->local ? sum : FAILED;
}

uint64_t loop_qp(struct objects *o, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++) {
		struct ibv_qp_init_attr_ex attr = {
			.send_cq = o->cq,
			.recv_cq = o->cq,
			.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
			.qp_type = IBV_QPT_RC,
			.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.pd = o->pd,
			.send_ops_flags = IBV_QP_EX_WITH_SEND,
		};
		struct ibv_qp *qp = ibv_create_qp_ex(o->context, &attr);
		if (!qp || o->destroy_qp(qp))
			return FAILED;
	}
	return n;
}

uint64_t loop_mr(struct objects *o, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++) {
		struct ibv_mr *mr = o->reg_mr(o->pd, (void *)(uintptr_t)o->local, o->len, IBV_ACCESS_LOCAL_WRITE);
		if (!mr || o->dereg_mr(mr))
			return FAILED;
	}
	return n;
}
