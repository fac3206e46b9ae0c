/* The C face on GPUs: rows out of whole tensors in device memory and back, and memory that the
 * caller gives. */
#include "tests/cp/c_api_cuda.h"

enum { kWidth = kHeads * kDim, kWholeBytes = kTokens * kWidth * 2 };

static void fill_all_rows(void* memory, unsigned seed) {
  int64_t rows[kTokens];
  for (int64_t i = 0; i < kTokens; ++i) rows[i] = i;
  fill_rows(memory, seed, rows, kTokens, kWidth);
}

/* The rows of a plan, and where the last test left them. */
struct rows {
  int64_t count;
  int64_t global[kTokens];
  void *whole, *local, *back;
};

static struct rows make_rows(cpattn_plan* plan) {
  struct rows r;
  memset(&r, 0, sizeof r);
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &r.count));
  CHECK_OK(cpattn_plan_global_rows(plan, CPATTN_Q, r.global, kTokens));
  CHECK_CUDA(cuda.malloc(&r.whole, kWholeBytes));
  CHECK_CUDA(cuda.malloc(&r.local, kWholeBytes));
  CHECK_CUDA(cuda.malloc(&r.back, kWholeBytes));
  return r;
}

static void clear_results(const struct rows* r) {
  void* zeros = allocate(kWholeBytes, 1);
  CHECK_CUDA(cuda.copy(r->local, zeros, kWholeBytes, kToDevice));
  CHECK_CUDA(cuda.copy(r->back, zeros, kWholeBytes, kToDevice));
  free(zeros);
}

static void check_rows(const struct rows* r) {
  uint16_t *whole = allocate(kWholeBytes, 1), *local = allocate(kWholeBytes, 1);
  uint16_t *back = allocate(kWholeBytes, 1), *expected = allocate(kWholeBytes, 1);
  CHECK_CUDA(cuda.copy(whole, r->whole, kWholeBytes, kToHost));
  CHECK_CUDA(cuda.copy(local, r->local, kWholeBytes, kToHost));
  CHECK_CUDA(cuda.copy(back, r->back, kWholeBytes, kToHost));
  for (int64_t i = 0; i < r->count; ++i) {
    const size_t at = (size_t)r->global[i] * kWidth;
    CHECK(memcmp(local + (size_t)i * kWidth, whole + at, kWidth * 2) == 0);
    memcpy(expected + at, whole + at, kWidth * 2);
  }
  CHECK(memcmp(back, expected, kWholeBytes) == 0); /* rows of other ranks are as they were */
  free(whole);
  free(local);
  free(back);
  free(expected);
}

static void copy_rows(cpattn_plan* plan, const struct rows* r, void* stream) {
  const cpattn_tensor whole = device_tensor(r->whole, kTokens, kHeads);
  const cpattn_tensor local = device_tensor(r->local, r->count, kHeads);
  const cpattn_tensor back = device_tensor(r->back, kTokens, kHeads);
  CHECK_OK(cpattn_plan_shard_on_device(plan, CPATTN_Q, &whole, &local, stream));
  CHECK_OK(cpattn_plan_unshard_on_device(plan, CPATTN_Q, &local, &back, stream));
}

static void check_row_refusals(cpattn_plan* plan, const struct rows* r, void* stream) {
  uint16_t* host = allocate(kWholeBytes, 1);
  const cpattn_tensor whole = device_tensor(r->whole, kTokens, kHeads);
  const cpattn_tensor local = device_tensor(r->local, r->count, kHeads);
  const cpattn_tensor on_host = device_tensor(host, kTokens, kHeads);
  const cpattn_tensor short_one = device_tensor(r->local, r->count + 1, kHeads);
  CHECK_REFUSED(cpattn_plan_shard_on_device(plan, CPATTN_Q, &on_host, &local, stream),
                CPATTN_INVALID_ARGUMENT, "global: host memory, expected memory of cuda:");
  CHECK_REFUSED(cpattn_plan_unshard_on_device(plan, CPATTN_Q, &short_one, &whole, stream),
                CPATTN_INVALID_ARGUMENT, "local: ");
  CHECK_REFUSED(cpattn_plan_shard_on_device(plan, CPATTN_Q, &whole, &local, NULL),
                CPATTN_INVALID_ARGUMENT, "stream: the legacy default stream");
  CHECK_REFUSED(cpattn_plan_shard_on_device(plan, CPATTN_Q, NULL, &local, stream),
                CPATTN_INVALID_ARGUMENT, "global: NULL");
  CHECK_REFUSED(cpattn_plan_shard_on_device(plan, (cpattn_side)7, &whole, &local, stream),
                CPATTN_INVALID_ARGUMENT, "side 7");
  CHECK_REFUSED(cpattn_plan_shard_on_device(NULL, CPATTN_Q, &whole, &local, stream),
                CPATTN_INVALID_ARGUMENT, "plan: NULL");
  free(host);
}

void test_rows(void) {
  cpattn_group* group = everybody();
  cpattn_group* gpus = on_gpus(group, CPATTN_EXCHANGE_AUTO);
  cpattn_plan* plan = device_plan(gpus);
  CHECK_CUDA(cuda.set_device(world_rank));
  void *stream = NULL, *graph = NULL, *work = NULL;
  CHECK_CUDA(cuda.stream_create(&stream));
  struct rows r = make_rows(plan);
  const cpattn_tensor whole = device_tensor(r.whole, kTokens, kHeads);
  const cpattn_tensor local = device_tensor(r.local, r.count, kHeads);

  CHECK_CUDA(cuda.begin_capture(stream, kCaptureGlobal));
  CHECK_REFUSED(cpattn_plan_shard_on_device(plan, CPATTN_Q, &whole, &local, stream),
                CPATTN_INVALID_ARGUMENT, "stream: in capture, expected none until");
  CHECK_CUDA(cuda.end_capture(stream, &graph));
  CHECK_CUDA(cuda.graph_destroy(graph));

  fill_all_rows(r.whole, 50);
  clear_results(&r);
  copy_rows(plan, &r, stream);
  CHECK_CUDA(cuda.stream_synchronize(stream));
  check_rows(&r);
  check_row_refusals(plan, &r, stream);

  CHECK_CUDA(cuda.begin_capture(stream, kCaptureGlobal));
  copy_rows(plan, &r, stream);
  CHECK_CUDA(cuda.end_capture(stream, &graph));
  CHECK_CUDA(cuda.instantiate(&work, graph, 0));
  CHECK_CUDA(cuda.graph_destroy(graph));
  fill_all_rows(r.whole, 60);
  clear_results(&r);
  CHECK_CUDA(cuda.graph_launch(work, stream));
  CHECK_CUDA(cuda.stream_synchronize(stream));
  check_rows(&r);
  CHECK_CUDA(cuda.exec_destroy(work));

  /* Of keys, whose rows are those of queries here. */
  CHECK_OK(cpattn_plan_shard_on_device(plan, CPATTN_KV, &whole, &local, stream));
  CHECK_CUDA(cuda.stream_synchronize(stream));
  check_rows(&r);
  CHECK_OK(cpattn_plan_free(&plan));

  /* Shards in host memory: the functions without a stream. */
  plan = packed_plan(group);
  uint16_t *all = allocate(kWholeBytes, 1), *one = allocate(kWholeBytes, 1);
  uint16_t* other = allocate(kWholeBytes, 1);
  for (size_t i = 0; i < kTokens * kWidth; ++i) all[i] = (uint16_t)i;
  const cpattn_tensor from = device_tensor(all, kTokens, kHeads);
  const cpattn_tensor to = device_tensor(one, r.count, kHeads);
  const cpattn_tensor same = device_tensor(other, r.count, kHeads);
  CHECK_OK(cpattn_plan_shard_on_device(plan, CPATTN_Q, &from, &to, NULL));
  CHECK_OK(cpattn_plan_shard(plan, CPATTN_Q, &from, &same));
  CHECK(memcmp(one, other, kWholeBytes) == 0);
  CHECK_REFUSED(cpattn_plan_shard_on_device(plan, CPATTN_Q, &from, &to, stream),
                CPATTN_INVALID_ARGUMENT, "expected none on the cpu");
  CHECK_REFUSED(cpattn_plan_shard_on_device(plan, CPATTN_Q, &whole, &to, NULL),
                CPATTN_INVALID_ARGUMENT, "global: memory of cuda:");
  free(all);
  free(one);
  free(other);
  CHECK_OK(cpattn_plan_free(&plan));
  CHECK_CUDA(cuda.stream_destroy(stream));
  CHECK_CUDA(cuda.free(r.whole));
  CHECK_CUDA(cuda.free(r.local));
  CHECK_CUDA(cuda.free(r.back));
  CHECK_OK(cpattn_group_free(&gpus));
  CHECK_OK(cpattn_group_free(&group));
}

/* A caller's own memory, counted. */
struct counted {
  int num_given, num_held, is_empty;
  size_t size;
};

static void* give(void* context, size_t size, void* stream) {
  struct counted* const memory = context;
  void* address = NULL;
  CHECK(stream != NULL);
  if (memory->is_empty) return NULL;
  CHECK_CUDA(cuda.malloc(&address, size));
  ++memory->num_given;
  ++memory->num_held;
  memory->size += size;
  return address;
}

static void take(void* context, void* address) {
  CHECK_CUDA(cuda.free(address));
  --((struct counted*)context)->num_held;
}

void test_allocator(void) {
  cpattn_group *group = everybody(), *gpus = NULL;
  struct counted memory = {0, 0, 0, 0};
  cpattn_cuda_options options = options_of(world_rank);
  options.allocate = give;
  CHECK_REFUSED(cpattn_group_on_cuda(group, &options, &gpus), CPATTN_INVALID_ARGUMENT,
                "allocate and free: one is NULL, expected both or none");
  options.free = take;
  options.allocator_context = &memory;
  CHECK_OK(cpattn_group_on_cuda(group, &options, &gpus));

  memory.is_empty = 1; /* on every rank, so that none waits for one that has some */
  cpattn_attention* attention = attention_on(gpus);
  cpattn_problem problem = usual_problem();
  cpattn_plan* plan = NULL;
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "bytes of device memory");
  CHECK(plan == NULL && memory.num_held == 0);
  CHECK_OK(cpattn_attention_free(&attention));
  memory.is_empty = 0;

  plan = device_plan(gpus);
  CHECK(memory.num_given > 0 && memory.num_held == memory.num_given);
  const int num_forward = memory.num_given;
  CHECK_OK(cpattn_plan_prepare_backward(plan));
  CHECK(memory.num_given > num_forward);
  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  struct device_tensors t = make_device_tensors(world_rank, count);
  const cpattn_forward_tensors forward = forward_on(&t);
  const cpattn_backward_tensors backward = backward_on(&t);
  const int num_all = memory.num_given;
  CHECK_OK(cpattn_forward(plan, &forward));
  CHECK_OK(cpattn_backward(plan, &backward));
  CHECK_CUDA(cuda.stream_synchronize(t.stream));
  CHECK(memory.num_given == num_all); /* calls take nothing */
  free_device_tensors(&t);
  CHECK_OK(cpattn_group_free(&gpus)); /* the plan keeps it */
  CHECK_OK(cpattn_plan_free(&plan));
  CHECK(memory.num_held == 0);
  CHECK_OK(cpattn_group_free(&group));
}
