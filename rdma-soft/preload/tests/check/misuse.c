/* Misuses soft0 in the way that the argument names, and prints the place: "qp wr_id address", each 0 if it does not apply. */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_qp *qps[2];
static char *from, *to;
static struct ibv_mr *from_mr, *to_mr;

static void check(int is_true, const char *what) {
    if (!is_true) {
        perror(what);
        _exit(1);
    }
}

static char *page(void) {
    void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(at != MAP_FAILED, "mmap");
    return at;
}

static struct ibv_mr *reg(struct ibv_pd *of, char *at, size_t len, int access) {
    struct ibv_mr *mr = ibv_reg_mr(of, at, len, access);
    check(mr != NULL, "ibv_reg_mr");
    return mr;
}

static void open_all(int entries) {
    int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_device **list = ibv_get_device_list(NULL);
    context = ibv_open_device(list[0]);
    check(context != NULL, "ibv_open_device");
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    channel = ibv_create_comp_channel(context);
    send_cq = ibv_create_cq(context, 32, NULL, NULL, 0);
    recv_cq = ibv_create_cq(context, entries, NULL, channel, 0);
    check(pd && channel && send_cq && recv_cq, "create");
    for (int end = 0; end < 2; end++) {
        struct ibv_qp_init_attr init = {.send_cq = send_cq, .recv_cq = recv_cq, .qp_type = IBV_QPT_RC,
                                        .cap = {8, 8, 1, 1, 0}};
        qps[end] = ibv_create_qp(pd, &init);
        check(qps[end] != NULL, "ibv_create_qp");
    }
    union ibv_gid gid;
    check(ibv_query_gid(context, 1, 0, &gid) == 0, "ibv_query_gid");
    for (int end = 0; end < 2; end++) {
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = all};
        check(!ibv_modify_qp(qps[end], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = qps[!end]->qp_num;
        attr.min_rnr_timer = 1;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid = gid;
        check(!ibv_modify_qp(qps[end], &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = 14;
        attr.retry_cnt = attr.rnr_retry = 7;
        check(!ibv_modify_qp(qps[end], &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
    }
    from = page();
    to = page();
    from_mr = reg(pd, from, PAGE, all);
    to_mr = reg(pd, to, PAGE, all);
}

static void post_recv(uint64_t wr_id, char *at, uint32_t len, uint32_t lkey) {
    struct ibv_sge sge = {(uintptr_t)at, len, lkey};
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;
    check(!ibv_post_recv(qps[1], &wr, &bad), "ibv_post_recv");
}

static void post(uint64_t wr_id, enum ibv_wr_opcode opcode, unsigned flags, char *at, uint32_t len, uint32_t lkey) {
    struct ibv_sge sge = {(uintptr_t)at, len, lkey};
    struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)to;
    wr.wr.rdma.rkey = to_mr->rkey;
    check(!ibv_post_send(qps[0], &wr, &bad), "ibv_post_send");
}

static void post_send(uint64_t wr_id, char *at, uint32_t len, uint32_t lkey) {
    post(wr_id, IBV_WR_SEND, IBV_SEND_SIGNALED, at, len, lkey);
}

static void poll_one(struct ibv_cq *cq) {
    struct ibv_wc wc;
    int count;
    while ((count = ibv_poll_cq(cq, 1, &wc)) == 0)
        ;
    check(count > 0, "ibv_poll_cq");
}

static void place(int end, uint64_t wr_id, const void *address) {
    printf("%u %llu %llu\n", end < 0 ? 0 : qps[end]->qp_num, (unsigned long long)wr_id,
           (unsigned long long)(uintptr_t)address);
}

/* Waits until the checker has made a report. */
static void wait_for_report(void) {
    struct stat file;
    for (int ms = 0; stat(getenv("MISUSE_REPORTS"), &file) || file.st_size == 0; ms++) {
        check(ms < 60000, "no report");
        usleep(1000);
    }
}

static void *arm_later(void *unused) {
    (void)unused;
    wait_for_report();
    ibv_req_notify_cq(recv_cq, 0);
    return NULL;
}

static void *acknowledge_later(void *cq) {
    wait_for_report();
    ibv_ack_cq_events(cq, 1);
    return NULL;
}


static void close_all(void) {
    check(!ibv_destroy_qp(qps[0]) && !ibv_destroy_qp(qps[1]), "ibv_destroy_qp");
    check(!ibv_dereg_mr(from_mr) && (!to_mr || !ibv_dereg_mr(to_mr)), "ibv_dereg_mr");
    check(!ibv_destroy_cq(send_cq) && !ibv_destroy_cq(recv_cq), "ibv_destroy_cq");
    check(!ibv_destroy_comp_channel(channel) && !ibv_dealloc_pd(pd) && !ibv_close_device(context), "close");
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "";
#define IS(name) (strcmp(kind, name) == 0)
    open_all(IS("cq-can-overrun") || IS("cq-overrun") ? 1 : 16);
    if (IS("none")) {
        post_recv(8, to, 100, to_mr->lkey);
        post_send(7, from, 100, from_mr->lkey);
        poll_one(send_cq);
        poll_one(recv_cq);
    } else if (IS("send-changed")) {
        post_send(7, from, 100, from_mr->lkey);
        from[42] = 1;
        post_recv(8, to, 100, to_mr->lkey);
        poll_one(send_cq);
        place(0, 7, from + 42);
    } else if (IS("receive-written")) {
        post_recv(8, to, 100, to_mr->lkey);
        to[70] = 1;
        post_send(7, from, 50, from_mr->lkey);
        poll_one(send_cq);
        place(1, 8, to + 70);
    } else if (IS("overlap")) {
        post_recv(8, to, 100, to_mr->lkey);
        post_recv(9, to + 50, 100, to_mr->lkey);
        place(1, 9, to + 50);
    } else if (IS("deregistered")) {
        post_recv(8, to, 100, to_mr->lkey);
        check(!ibv_dereg_mr(to_mr), "ibv_dereg_mr");
        to_mr = NULL;
        place(1, 8, to);
    } else if (IS("unmapped")) {
        post_recv(8, to, 100, to_mr->lkey);
        check(!munmap(to, PAGE), "munmap");
        place(1, 8, to);
    } else if (IS("stale-key")) {
        struct ibv_mr *mr = reg(pd, from, PAGE, 0);
        uint32_t lkey = mr->lkey;
        check(!ibv_dereg_mr(mr), "ibv_dereg_mr");
        post_send(7, from, 100, lkey);
        poll_one(send_cq);
        place(0, 7, from);
    } else if (IS("unknown-key")) {
        post_send(7, from, 100, from_mr->lkey + 1);
        poll_one(send_cq);
        place(0, 7, from);
    } else if (IS("key-range")) {
        post_send(7, from + 1, PAGE, from_mr->lkey);
        poll_one(send_cq);
        place(0, 7, from + 1);
    } else if (IS("key-domain")) {
        struct ibv_pd *other = ibv_alloc_pd(context);
        struct ibv_mr *mr = reg(other, from, PAGE, 0);
        post_send(7, from, 100, mr->lkey);
        poll_one(send_cq);
        place(0, 7, from);
        check(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(other), "ibv_dealloc_pd");
    } else if (IS("key-access")) {
        struct ibv_mr *mr = reg(pd, to, PAGE, 0);
        post_recv(8, to, 100, mr->lkey);
        post_send(7, from, 100, from_mr->lkey);
        poll_one(send_cq);
        place(1, 8, to);
        check(!ibv_dereg_mr(mr), "ibv_dereg_mr");
    } else if (IS("cq-can-overrun")) {
        post_recv(8, to, 0, to_mr->lkey);
        post_recv(9, to, 0, to_mr->lkey);
        place(1, 9, NULL);
    } else if (IS("cq-overrun")) {
        post_recv(8, to, 0, to_mr->lkey);
        post_recv(9, to, 0, to_mr->lkey);
        post_send(6, from, 0, from_mr->lkey);
        post_send(7, from, 0, from_mr->lkey);
        place(1, 9, NULL);
    } else if (IS("unsignaled-full")) {
        for (int i = 0; i < 8; i++)
            post(10 + i, IBV_WR_RDMA_WRITE, 0, from, 8, from_mr->lkey);
        place(0, 17, NULL);
    } else if (IS("lost-wakeup")) {
        struct ibv_cq *found;
        void *user;
        pthread_t thread;
        post_recv(8, to, 0, to_mr->lkey);
        post_send(7, from, 0, from_mr->lkey);
        poll_one(send_cq);
        pthread_create(&thread, NULL, arm_later, NULL);
        check(!ibv_get_cq_event(channel, &found, &user), "ibv_get_cq_event");
        ibv_ack_cq_events(found, 1);
        pthread_join(thread, NULL);
        place(-1, 0, NULL);
    } else if (IS("unacked-events")) {
        struct ibv_cq *found, *cq = ibv_create_cq(context, 4, NULL, channel, 0);
        struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {0, 1, 0, 0, 0}};
        struct ibv_qp *qp = ibv_create_qp(pd, &init);
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
        struct ibv_recv_wr wr = {0}, *bad;
        void *user;
        pthread_t thread;
        check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
        check(!ibv_req_notify_cq(cq, 0) && !ibv_post_recv(qp, &wr, &bad), "ibv_post_recv");
        attr.qp_state = IBV_QPS_ERR;
        check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "ERR");
        check(!ibv_get_cq_event(channel, &found, &user) && !ibv_destroy_qp(qp), "ibv_get_cq_event");
        pthread_create(&thread, NULL, acknowledge_later, cq);
        check(!ibv_destroy_cq(cq), "ibv_destroy_cq");
        pthread_join(thread, NULL);
        place(-1, 0, NULL);
    } else if (IS("receiver-not-ready")) {
        post_send(7, from, 100, from_mr->lkey);
        wait_for_report();
        post_recv(8, to, 100, to_mr->lkey);
        poll_one(send_cq);
        place(1, 0, NULL);
    } else if (IS("receive-too-small")) {
        post_recv(8, to, 99, to_mr->lkey);
        post_send(7, from, 100, from_mr->lkey);
        poll_one(send_cq);
        place(1, 8, to);
    } else if (IS("leaked")) {
        place(-1, 0, NULL);
        return 0;
    } else if (IS("used-after-fork")) {
        int status;
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            struct ibv_sge sge = {0, 0, 0};
            struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
            exit(ibv_post_recv(qps[1], &wr, &bad) == 0);
        }
        check(waitpid(child, &status, 0) == child, "waitpid");
        place(-1, 0, NULL);
        close_all();
        return WEXITSTATUS(status);
    } else if (IS("memlock")) {
        char *large = malloc(1 << 20);
        struct ibv_mr *mr = reg(pd, large, 1 << 20, 0);
        place(-1, 0, large);
        check(!ibv_dereg_mr(mr), "ibv_dereg_mr");
        free(large);
    } else {
        fprintf(stderr, "unknown kind %s\n", kind);
        return 2;
    }
    close_all();
    return 0;
}
