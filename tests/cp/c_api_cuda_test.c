/* The C face on GPUs, on the doubles of CUDA and NCCL: executed on the CPU. The same bits for every
 * number of ranks, eagerly and from a graph; largest logits in one place through all of it. */
#include "tests/cp/c_api_cuda.h"

#include <dlfcn.h>

int world_rank = 0;
int world_size = 1;
struct cuda_calls cuda;
const char* backend_path;

static void find_calls(void) {
  struct named {
    void* place;
    const char* name;
  } const all[] = {{&cuda.set_device, "cudaSetDevice"},
                   {&cuda.malloc, "cudaMalloc"},
                   {&cuda.free, "cudaFree"},
                   {&cuda.copy, "cudaMemcpy"},
                   {&cuda.stream_create, "cudaStreamCreate"},
                   {&cuda.stream_destroy, "cudaStreamDestroy"},
                   {&cuda.stream_synchronize, "cudaStreamSynchronize"},
                   {&cuda.begin_capture, "cudaStreamBeginCapture"},
                   {&cuda.end_capture, "cudaStreamEndCapture"},
                   {&cuda.instantiate, "cudaGraphInstantiate"},
                   {&cuda.graph_launch, "cudaGraphLaunch"},
                   {&cuda.graph_destroy, "cudaGraphDestroy"},
                   {&cuda.exec_destroy, "cudaGraphExecDestroy"},
                   {&cuda.nccl_unique_id, "ncclGetUniqueId"},
                   {&cuda.nccl_init_rank, "ncclCommInitRank"},
                   {&cuda.nccl_destroy, "ncclCommDestroy"},
                   {&cuda.nccl_async_error, "ncclCommGetAsyncError"},
                   {&cuda.machine, "cpattn_fake_machine"},
                   {&cuda.reset, "cpattn_fake_reset"}};
  void* object = dlopen(backend_path, RTLD_NOW | RTLD_LOCAL);
  if (object == NULL) fprintf(stderr, "%s\n", dlerror());
  CHECK(object != NULL);
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
    void* call = dlsym(object, all[i].name);
    if (call == NULL) fail(all[i].name, __FILE__, __LINE__);
    memcpy(all[i].place, &call, sizeof call);
  }
}

/* What a pass gives, of all tokens: out, lse, dq, dk, dv one after the other, and the maxima. */
enum {
  kWideBytes = kTokens * kHeads * kDim * 2,
  kNarrowBytes = kTokens * kKvHeads * kDim * 2,
  kLseBytes = kTokens * kHeads * 4
};
struct results {
  char out[kWideBytes], dq[kWideBytes], dk[kNarrowBytes], dv[kNarrowBytes], lse[kLseBytes];
  float head_maxima[kHeads];
};

/* What differs, or NULL. */
static const char* difference(const struct results* a, const struct results* b) {
  if (memcmp(a->out, b->out, sizeof a->out) != 0) return "out";
  if (memcmp(a->lse, b->lse, sizeof a->lse) != 0) return "lse";
  if (memcmp(a->dq, b->dq, sizeof a->dq) != 0) return "dq";
  if (memcmp(a->dk, b->dk, sizeof a->dk) != 0) return "dk";
  if (memcmp(a->dv, b->dv, sizeof a->dv) != 0) return "dv";
  if (memcmp(a->head_maxima, b->head_maxima, sizeof a->head_maxima) != 0) return "head_maxima";
  return NULL;
}

static void check_same(const struct results* a, const struct results* b, int line) {
  const char* what = difference(a, b);
  if (what != NULL) fail(what, __FILE__, line);
}

/* Rows of a tensor in device memory, gathered from all ranks. `width` numbers of a dtype. */
static void gather(cpattn_plan* plan, const void* memory, int64_t rows, cpattn_dtype dtype,
                   int64_t width, void* whole) {
  const size_t size = (size_t)(rows * width) * (dtype == CPATTN_BF16 ? 2 : 4);
  void* here = allocate(size, 1);
  CHECK_CUDA(cuda.copy(here, memory, size, kToHost));
  const cpattn_tensor local = cpattn_contiguous(here, dtype, rows, 1, width);
  const cpattn_tensor global = cpattn_contiguous(whole, dtype, kTokens, 1, width);
  CHECK_OK(cpattn_plan_all_gather(plan, CPATTN_Q, &local, &global));
  free(here);
}

static void fetch(cpattn_plan* plan, const struct device_tensors* t, struct results* whole) {
  CHECK_CUDA(cuda.stream_synchronize(t->stream));
  gather(plan, t->out, t->rows, CPATTN_BF16, kHeads * kDim, whole->out);
  gather(plan, t->lse, t->rows, CPATTN_F32, kHeads, whole->lse);
  gather(plan, t->dq, t->rows, CPATTN_BF16, kHeads * kDim, whole->dq);
  gather(plan, t->dk, t->rows, CPATTN_BF16, kKvHeads * kDim, whole->dk);
  gather(plan, t->dv, t->rows, CPATTN_BF16, kKvHeads * kDim, whole->dv);
  CHECK_CUDA(cuda.copy(whole->head_maxima, t->head_maxima, sizeof whole->head_maxima, kToHost));
}

static void pass(cpattn_plan* plan, const struct device_tensors* t) {
  const cpattn_forward_tensors forward = forward_on(t);
  const cpattn_backward_tensors backward = backward_on(t);
  CHECK_OK(cpattn_forward(plan, &forward));
  CHECK_OK(cpattn_backward(plan, &backward));
}

static void check_unobserved(const struct device_tensors* t) {
  float maxima[kHeads];
  CHECK_CUDA(cuda.stream_synchronize(t->stream));
  CHECK_CUDA(cuda.copy(maxima, t->head_maxima, sizeof maxima, kToHost));
  for (int h = 0; h < kHeads; ++h) CHECK(maxima[h] == -INFINITY);
}

/* Two steps of two micro-batches each: the largest logits accumulate in one place over a step's
 * batches, are made the group's, are read, and are reset there. With a graph, all of it but the
 * group's maximum is replayed, the reset included. */
enum { kSteps = 2, kBatches = 2 };
static void train(cpattn_group* group, int is_replayed, struct results* steps) {
  int device = 0;
  CHECK_OK(cpattn_group_rank(group, &device));
  cpattn_plan* plan = device_plan(group);
  CHECK_OK(cpattn_plan_prepare_backward(plan));
  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  int64_t* rows = allocate((size_t)count, sizeof(int64_t));
  CHECK_OK(cpattn_plan_global_rows(plan, CPATTN_Q, rows, (size_t)count));
  struct device_tensors t = make_device_tensors(device, count);
  CHECK_OK(cpattn_reset_head_maxima(plan, t.head_maxima, t.stream));
  check_unobserved(&t);
  void *work = NULL, *reset = NULL, *graph = NULL;
  if (is_replayed) { /* nothing of it has run before */
    CHECK_CUDA(cuda.begin_capture(t.stream, kCaptureGlobal));
    pass(plan, &t);
    CHECK_CUDA(cuda.end_capture(t.stream, &graph));
    CHECK_CUDA(cuda.instantiate(&work, graph, 0));
    CHECK_CUDA(cuda.graph_destroy(graph));
    CHECK_CUDA(cuda.begin_capture(t.stream, kCaptureGlobal));
    CHECK_OK(cpattn_reset_head_maxima(plan, t.head_maxima, t.stream));
    CHECK_CUDA(cuda.end_capture(t.stream, &graph));
    CHECK_CUDA(cuda.instantiate(&reset, graph, 0));
    CHECK_CUDA(cuda.graph_destroy(graph));
    check_unobserved(&t); /* recorded, not done */
  }
  for (int step = 0; step < kSteps; ++step) {
    for (int batch = 0; batch < kBatches; ++batch) {
      CHECK_CUDA(cuda.stream_synchronize(t.stream));
      fill_inputs(&t, 10u * (unsigned)(step * kBatches + batch), rows);
      if (is_replayed) {
        CHECK_CUDA(cuda.graph_launch(work, t.stream));
      } else {
        pass(plan, &t);
      }
    }
    CHECK_OK(cpattn_max_over_ranks(group, t.head_maxima, kHeads, t.stream, 60.0));
    fetch(plan, &t, &steps[step]);
    for (int h = 0; h < kHeads; ++h) CHECK(isfinite(steps[step].head_maxima[h]));
    if (is_replayed) {
      CHECK_CUDA(cuda.graph_launch(reset, t.stream));
    } else {
      CHECK_OK(cpattn_reset_head_maxima(plan, t.head_maxima, t.stream));
    }
    check_unobserved(&t);
  }
  if (is_replayed) {
    CHECK_CUDA(cuda.exec_destroy(work));
    CHECK_CUDA(cuda.exec_destroy(reset));
  }
  CHECK_OK(cpattn_plan_free(&plan));
  free_device_tensors(&t);
  free(rows);
}

static void test_same_bits_as_one_rank(void) {
  cpattn_group *alone = NULL, *group = everybody();
  CHECK_OK(cpattn_group_self(&alone));
  cpattn_group* one_gpu = on_gpus(alone, CPATTN_EXCHANGE_AUTO);
  static struct results expected[kSteps], found[kSteps];
  train(one_gpu, 0, expected);
  CHECK(memcmp(&expected[0], &expected[1], sizeof expected[0]) != 0);
  const cpattn_exchange exchanges[] = {CPATTN_EXCHANGE_NCCL, CPATTN_EXCHANGE_HOST};
  for (int i = 0; i < 2; ++i) {
    cpattn_group* gpus = on_gpus(group, exchanges[i]);
    train(gpus, 0, found);
    for (int step = 0; step < kSteps; ++step) check_same(&found[step], &expected[step], __LINE__);
    if (exchanges[i] == CPATTN_EXCHANGE_NCCL) {
      memset(found, 0, sizeof found);
      train(gpus, 1, found);
      for (int step = 0; step < kSteps; ++step) check_same(&found[step], &expected[step], __LINE__);
    }
    CHECK_OK(cpattn_group_free(&gpus));
  }
  CHECK_OK(cpattn_group_free(&one_gpu));
  CHECK_OK(cpattn_group_free(&alone));
  CHECK_OK(cpattn_group_free(&group));
}

/* Device memory that holds these numbers. */
static void check_memory(const void* there, const float* here, size_t count) {
  float* fetched = allocate(count, sizeof(float));
  CHECK_CUDA(cuda.copy(fetched, there, count * sizeof(float), kToHost));
  CHECK(memcmp(fetched, here, count * sizeof(float)) == 0);
  free(fetched);
}

/* f32 is the CPU's arithmetic. */
static void test_f32_has_the_bits_of_the_cpu(void) {
  cpattn_group* group = everybody();
  cpattn_group* gpus = on_gpus(group, CPATTN_EXCHANGE_AUTO);
  cpattn_plan *here = packed_plan(group), *there = packed_plan(gpus);
  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(here, CPATTN_Q, &count));
  struct tensors own = make_tensors(count);
  const size_t q = (size_t)count * kHeads * kDim, kv = (size_t)count * kKvHeads * kDim;
  const size_t lse = (size_t)count * kHeads;
  for (size_t i = 0; i < q; ++i) own.q[i] = number(1u + (unsigned)world_rank, i);
  for (size_t i = 0; i < kv; ++i) own.k[i] = number(20u + (unsigned)world_rank, i);
  for (size_t i = 0; i < kv; ++i) own.v[i] = number(30u + (unsigned)world_rank, i);
  for (size_t i = 0; i < q; ++i) own.dout[i] = number(40u + (unsigned)world_rank, i);
  float maxima[kHeads], device_maxima[kHeads];
  CHECK_OK(cpattn_reset_head_maxima(here, maxima, NULL));
  for (int h = 0; h < kHeads; ++h) CHECK(maxima[h] == -INFINITY);
  cpattn_forward_tensors forward = forward_of(&own);
  forward.head_maxima = maxima;
  const cpattn_backward_tensors backward = backward_of(&own);
  CHECK_OK(cpattn_forward(here, &forward));
  CHECK_OK(cpattn_backward(here, &backward));
  CHECK_OK(cpattn_max_over_ranks(group, maxima, kHeads, NULL, 30.0));

  /* Room for f32, which takes twice as much. */
  struct device_tensors t = make_device_tensors(world_rank, 2 * count);
  CHECK_CUDA(cuda.copy(t.q, own.q, q * sizeof(float), kToDevice));
  CHECK_CUDA(cuda.copy(t.k, own.k, kv * sizeof(float), kToDevice));
  CHECK_CUDA(cuda.copy(t.v, own.v, kv * sizeof(float), kToDevice));
  CHECK_CUDA(cuda.copy(t.dout, own.dout, q * sizeof(float), kToDevice));
  CHECK_OK(cpattn_reset_head_maxima(there, t.head_maxima, t.stream));
  cpattn_forward_tensors on_gpu = forward;
  on_gpu.q.data = t.q;
  on_gpu.k.data = t.k;
  on_gpu.v.data = t.v;
  on_gpu.out.data = t.out;
  on_gpu.lse.data = t.lse;
  on_gpu.head_maxima = t.head_maxima;
  on_gpu.stream = t.stream;
  cpattn_backward_tensors back_on_gpu = backward;
  back_on_gpu.q.data = t.q;
  back_on_gpu.k.data = t.k;
  back_on_gpu.v.data = t.v;
  back_on_gpu.out.data = t.out;
  back_on_gpu.lse.data = t.lse;
  back_on_gpu.dout.data = t.dout;
  back_on_gpu.dq.data = t.dq;
  back_on_gpu.dk.data = t.dk;
  back_on_gpu.dv.data = t.dv;
  back_on_gpu.stream = t.stream;
  CHECK_OK(cpattn_forward(there, &on_gpu));
  CHECK_OK(cpattn_backward(there, &back_on_gpu));
  CHECK_OK(cpattn_max_over_ranks(gpus, t.head_maxima, kHeads, t.stream, 30.0));
  CHECK_CUDA(cuda.copy(device_maxima, t.head_maxima, sizeof device_maxima, kToHost));
  CHECK(memcmp(device_maxima, maxima, sizeof maxima) == 0);
  check_memory(t.out, own.out, q);
  check_memory(t.lse, own.lse, lse);
  check_memory(t.dq, own.dq, q);
  check_memory(t.dk, own.dk, kv);
  check_memory(t.dv, own.dv, kv);
  free_tensors(&own);
  CHECK_OK(cpattn_plan_free(&here));
  CHECK_OK(cpattn_plan_free(&there));
  free_device_tensors(&t);
  CHECK_OK(cpattn_group_free(&gpus));
  CHECK_OK(cpattn_group_free(&group));
}

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  backend_path = argv[1];
#ifdef CP_TEST_WITH_MPI
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
#endif
  find_calls();
  test_machines();
  test_nccl_communicators();
  test_tensors();
  test_captures();
  test_rows();
  test_allocator();
  test_f32_has_the_bits_of_the_cpu();
  test_same_bits_as_one_rank();
#ifdef CP_TEST_WITH_MPI
  MPI_Finalize();
#endif
  printf("c_api_cuda_test: rank %d of %d: all checks passed\n", world_rank, world_size);
  return 0;
}
