/* What the C face refuses on GPUs: with one text on all ranks, before anything is launched. */
#include "tests/cp/c_api_cuda.h"

static int is_last(void) { return world_rank == world_size - 1; }

/* Refused on every rank, with a text that contains "rank LAST: " unless all are to blame. */
static void check_group_refused(cpattn_group* group, const cpattn_cuda_options* options,
                                cpattn_status status, const char* part, int line) {
  cpattn_group* gpus = NULL;
  if (cpattn_group_on_cuda(group, options, &gpus) != status ||
      strstr(cpattn_last_error(), part) == NULL)
    fail(part, __FILE__, line);
  CHECK(gpus == NULL);
}
#define CHECK_GROUP_REFUSED(options, status, part) \
  check_group_refused(group, options, status, part, __LINE__)

/* A machine that lacks something: the last rank's. */
static void check_machine(cpattn_group* group, const char* field, long value, const char* part) {
  if (is_last()) CHECK(cuda.machine(field, value) == 0);
  cpattn_cuda_options options = options_of(world_rank);
  check_group_refused(group, &options, CPATTN_UNSUPPORTED, part, __LINE__);
  char culprit[32];
  snprintf(culprit, sizeof culprit, "rank %d: ", world_size - 1);
  CHECK(strstr(cpattn_last_error(), culprit) == cpattn_last_error());
  cuda.reset();
}

void test_machines(void) {
  cpattn_group* group = everybody();
  cpattn_cuda_options options = options_of(world_rank);
  if (is_last()) options.backend = "./no_such_backend.so";
  CHECK_GROUP_REFUSED(&options, CPATTN_UNSUPPORTED, "CUDA backend ./no_such_backend.so: ");
  check_machine(group, "driver_version", 0, "no CUDA driver on this machine");
  check_machine(group, "driver_version", 12040, "older than the library: it knows CUDA up to 12.4");
  check_machine(group, "num_devices", 0, "no GPU that it gives to this process");
  check_machine(group, "compute_capability", 75, "is sm_75: the kernels need sm_80 or newer");

  options = options_of(world_rank);
  if (is_last()) options.device = 99;
  CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "device cuda:99: this machine has cuda:0");
  options = options_of(world_rank);
  options.struct_size = 8;
  CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "cuda_options.struct_size is 8");
  CHECK_GROUP_REFUSED(NULL, CPATTN_INVALID_ARGUMENT, "cuda_options: NULL");
  options = options_of(world_rank);
  if (is_last()) options.exchange = (cpattn_exchange)9;
  CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "exchange 9: expected CPATTN_EXCHANGE_A");
  options = options_of(world_rank);
  if (is_last()) options.timeout_seconds = 0.0;
  CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "timeout_seconds is 0, expected 0.001");
  options = options_of(world_rank);
  options.exchange = CPATTN_EXCHANGE_HOST;
  options.nccl_comm = &options;
  CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "nccl_comm is set, expected none with");
  CHECK_REFUSED(cpattn_group_on_cuda(NULL, &options, NULL), CPATTN_INVALID_ARGUMENT, "group: NULL");
  if (world_size > 1) {
    options = options_of(world_rank);
    options.exchange = is_last() ? CPATTN_EXCHANGE_HOST : CPATTN_EXCHANGE_NCCL;
    CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "exchange differs between ranks");
    /* All on one GPU. */
    options = options_of(0);
    options.exchange = CPATTN_EXCHANGE_NCCL;
    CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "ranks 0 and 1 have the same GPU");
    options.exchange = CPATTN_EXCHANGE_AUTO; /* goes through the host then */
    cpattn_group* gpus = NULL;
    CHECK_OK(cpattn_group_on_cuda(group, &options, &gpus));
    CHECK_OK(cpattn_group_free(&gpus));
  }
  CHECK_OK(cpattn_group_free(&group));
}

static void* make_nccl_communicator(int device, int size, int rank) {
  nccl_id id;
  void* comm = NULL;
  memset(&id, 0, sizeof id);
  if (rank == 0) CHECK_CUDA(cuda.nccl_unique_id(&id));
#ifdef CP_TEST_WITH_MPI
  if (size > 1) MPI_Bcast(id.bytes, sizeof id.bytes, MPI_CHAR, 0, MPI_COMM_WORLD);
#endif
  CHECK_CUDA(cuda.set_device(device));
  CHECK_CUDA(cuda.nccl_init_rank(&comm, size, id, rank));
  return comm;
}

void test_nccl_communicators(void) {
  cpattn_group *group = everybody(), *gpus = NULL;
  void* comm = make_nccl_communicator(world_rank, world_size, world_rank);
  void* own = make_nccl_communicator(world_rank, 1, 0);
  cpattn_cuda_options options = options_of(world_rank);
  options.nccl_comm = comm;
  if (is_last()) options.device = world_rank + 1;
  CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT,
                      "the NCCL communicator that was given is of cuda:");
  options = options_of(world_rank);
  options.nccl_comm = comm;
  CHECK_OK(cpattn_group_on_cuda(group, &options, &gpus));
  /* It is used, and stays ours. */
  cpattn_plan* plan = device_plan(gpus);
  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  struct device_tensors t = make_device_tensors(world_rank, count);
  const cpattn_forward_tensors forward = forward_on(&t);
  CHECK_OK(cpattn_forward(plan, &forward));
  CHECK_CUDA(cuda.stream_synchronize(t.stream));
  CHECK_OK(cpattn_plan_free(&plan));
  CHECK_OK(cpattn_group_free(&gpus));
  int error = kInProgress;
  CHECK_CUDA(cuda.nccl_async_error(comm, &error));
  CHECK(error == 0);
  free_device_tensors(&t);
  if (world_size > 1) {
    options.nccl_comm = is_last() ? own : comm;
    CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "is of rank 0 of 1, expected rank");
    options.nccl_comm = is_last() ? NULL : comm;
    CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT, "nccl_comm differs between ranks");
  }
  CHECK_CUDA(cuda.nccl_destroy(comm));
  options.nccl_comm = comm;
  CHECK_GROUP_REFUSED(&options, CPATTN_INVALID_ARGUMENT,
                      "the NCCL communicator that was given cannot be used");
  CHECK_CUDA(cuda.nccl_destroy(own));
  CHECK_OK(cpattn_group_free(&group));
}

/* A forward that the last rank gives something wrong: refused on all, and the next one works. */
#define CHECK_FORWARD_REFUSED(field, wrong, part)                                   \
  do {                                                                              \
    cpattn_forward_tensors changed = good;                                          \
    if (is_last()) changed.field = (wrong);                                         \
    CHECK_REFUSED(cpattn_forward(plan, &changed), CPATTN_INVALID_ARGUMENT, (part)); \
  } while (0)

void test_tensors(void) {
  cpattn_group* group = everybody();
  cpattn_group* gpus = on_gpus(group, CPATTN_EXCHANGE_AUTO);
  const cpattn_setting isa = {"isa", "generic"};
  cpattn_attention* attention = NULL;
  CHECK_REFUSED(cpattn_attention_create(gpus, &isa, 1, &attention), CPATTN_INVALID_ARGUMENT,
                "isa is set, expected none");
  attention = attention_on(gpus);
  cpattn_problem problem = usual_problem();
  cpattn_plan* plan = NULL;
  problem.head_dim = 257;
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "head_dim is 257, expected 1 to 256");
  CHECK_OK(cpattn_attention_free(&attention));

  plan = device_plan(gpus);
  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  struct device_tensors t = make_device_tensors(world_rank, count);
  struct device_tensors next = make_device_tensors(world_rank + 1, count);
  CHECK_CUDA(cuda.set_device(world_rank));
  uint16_t* host = allocate((size_t)count * kHeads * kDim, sizeof(uint16_t));
  const cpattn_forward_tensors good = forward_on(&t);
  CHECK_FORWARD_REFUSED(q.data, host, "q: host memory, expected memory of cuda:");
  CHECK_FORWARD_REFUSED(out.data, next.out, "out: memory of cuda:");
  CHECK_FORWARD_REFUSED(k.data, (char*)t.k + 2, "k: address 0x");
  CHECK(strstr(cpattn_last_error(), ", expected a multiple of 16") != NULL);
  CHECK_FORWARD_REFUSED(head_maxima, t.head_maxima + 1, "head_maxima: address 0x");
  CHECK_FORWARD_REFUSED(stream, NULL, "stream: the legacy default stream");
  CHECK_FORWARD_REFUSED(stream, next.stream, "stream: of cuda:");
  CHECK_FORWARD_REFUSED(struct_size, 8, "forward_tensors.struct_size is 8");
  cpattn_backward_tensors backward = backward_on(&t);
  if (is_last()) backward.dk.data = host;
  CHECK_REFUSED(cpattn_backward(plan, &backward), CPATTN_INVALID_ARGUMENT, "dk: host memory");
  CHECK_REFUSED(cpattn_reset_head_maxima(plan, (float*)(void*)host, t.stream),
                CPATTN_INVALID_ARGUMENT, "head_maxima: host memory");
  CHECK_REFUSED(cpattn_reset_head_maxima(plan, NULL, t.stream), CPATTN_INVALID_ARGUMENT,
                "head_maxima: null");
  CHECK_REFUSED(cpattn_reset_head_maxima(plan, t.head_maxima, NULL), CPATTN_INVALID_ARGUMENT,
                "stream: the legacy default stream");
  float* const wrong = is_last() ? (float*)(void*)host : t.head_maxima;
  CHECK_REFUSED(cpattn_max_over_ranks(gpus, wrong, kHeads, t.stream, 30.0), CPATTN_INVALID_ARGUMENT,
                "values: host memory");
  CHECK_REFUSED(cpattn_max_over_ranks(gpus, t.head_maxima, kHeads, t.stream, is_last() ? 0 : 30.0),
                CPATTN_INVALID_ARGUMENT, "timeout_seconds is 0");
  if (world_size > 1)
    CHECK_REFUSED(cpattn_max_over_ranks(gpus, t.head_maxima, is_last() ? 1 : kHeads, t.stream, 30),
                  CPATTN_INVALID_ARGUMENT, "has 1 values, expected 4");
  CHECK_OK(cpattn_forward(plan, &good));
  CHECK_CUDA(cuda.stream_synchronize(t.stream));

  /* Tools work on host memory, whatever the plan computes on. */
  const cpattn_tensor there = device_tensor(t.q, count, kHeads);
  uint16_t* whole = allocate(kTokens * kHeads * kDim, sizeof(uint16_t));
  const cpattn_tensor all = device_tensor(whole, kTokens, kHeads);
  CHECK_REFUSED(cpattn_plan_shard(plan, CPATTN_Q, &all, &there), CPATTN_INVALID_ARGUMENT,
                "local: memory of cuda:");
  CHECK(strstr(cpattn_last_error(), ", expected host memory") != NULL);
  CHECK_REFUSED(cpattn_plan_all_gather(plan, CPATTN_Q, &there, &all), CPATTN_INVALID_ARGUMENT,
                "local: memory of cuda:");
  CHECK_OK(cpattn_plan_free(&plan));

  /* Device memory, or a stream, for shards in host memory. */
  plan = packed_plan(group);
  struct tensors own = make_tensors(count);
  cpattn_forward_tensors here = forward_of(&own);
  if (is_last()) here.v.data = t.v;
  CHECK_REFUSED(cpattn_forward(plan, &here), CPATTN_INVALID_ARGUMENT, "v: memory of cuda:");
  here = forward_of(&own);
  if (is_last()) here.stream = t.stream;
  CHECK_REFUSED(cpattn_forward(plan, &here), CPATTN_INVALID_ARGUMENT, "expected none on the cpu");
  here.stream = NULL;
  CHECK_OK(cpattn_forward(plan, &here));
  free_tensors(&own);
  free(host);
  free(whole);
  CHECK_OK(cpattn_plan_free(&plan));
  free_device_tensors(&next);
  free_device_tensors(&t);
  CHECK_OK(cpattn_group_free(&gpus));
  CHECK_OK(cpattn_group_free(&group));
}

/* In a capture nothing moves, so each rank refuses by itself; and the capture goes on. */
static void check_captures(cpattn_group* gpus, int can_capture) {
  cpattn_plan* plan = device_plan(gpus);
  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  struct device_tensors t = make_device_tensors(world_rank, count);
  cpattn_forward_tensors forward = forward_on(&t);
  const cpattn_backward_tensors backward = backward_on(&t);
  void* graph = NULL;
  CHECK_CUDA(cuda.begin_capture(t.stream, kCaptureGlobal));
  CHECK_REFUSED(cpattn_backward(plan, &backward), CPATTN_INVALID_ARGUMENT,
                "stream: in capture, expected none until prepare_backward()");
  CHECK_REFUSED(cpattn_max_over_ranks(gpus, t.head_maxima, kHeads, t.stream, 30.0),
                CPATTN_INVALID_ARGUMENT, "stream: in capture, expected one whose work runs");
  forward.q.dtype = (cpattn_dtype)7;
  CHECK_REFUSED(cpattn_forward(plan, &forward), CPATTN_INVALID_ARGUMENT, "q: dtype 7");
  forward = forward_on(&t);
  forward.lse.data = (float*)((char*)t.lse + 4);
  CHECK_REFUSED(cpattn_forward(plan, &forward), CPATTN_INVALID_ARGUMENT, "lse: address 0x");
  if (!can_capture) {
    forward = forward_on(&t);
    CHECK_REFUSED(cpattn_forward(plan, &forward), CPATTN_INVALID_ARGUMENT,
                  "stream: in capture, expected none: transport");
  }
  CHECK_CUDA(cuda.end_capture(t.stream, &graph));
  CHECK_CUDA(cuda.graph_destroy(graph));
  CHECK_OK(cpattn_plan_free(&plan));
  free_device_tensors(&t);
}

void test_captures(void) {
  cpattn_group* group = everybody();
  const cpattn_exchange exchanges[] = {CPATTN_EXCHANGE_NCCL, CPATTN_EXCHANGE_HOST};
  for (int i = 0; i < 2; ++i) {
    cpattn_group* gpus = on_gpus(group, exchanges[i]);
    check_captures(gpus, exchanges[i] == CPATTN_EXCHANGE_NCCL);
    CHECK_OK(cpattn_group_free(&gpus));
  }
  CHECK_OK(cpattn_group_free(&group));
}
