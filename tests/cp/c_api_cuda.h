/* The C face on GPUs, which are the doubles of CUDA and NCCL: their functions, by the names and
 * with the meaning that the runtime's header gives them, out of the shared object that the library
 * opens as its backend. */
#pragma once

#include "tests/cp/c_api_checks.h"

typedef struct nccl_id {
  char bytes[128];
} nccl_id;

struct cuda_calls {
  int (*set_device)(int device);
  int (*malloc)(void** memory, size_t size);
  int (*free)(void* memory);
  int (*copy)(void* to, const void* from, size_t size, int kind);
  int (*stream_create)(void** stream);
  int (*stream_destroy)(void* stream);
  int (*stream_synchronize)(void* stream);
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*instantiate)(void** exec, void* graph, unsigned long long flags);
  int (*graph_launch)(void* exec, void* stream);
  int (*graph_destroy)(void* graph);
  int (*exec_destroy)(void* exec);
  int (*nccl_unique_id)(nccl_id* id);
  int (*nccl_init_rank)(void** comm, int size, nccl_id id, int rank);
  int (*nccl_destroy)(void* comm);
  int (*nccl_async_error)(void* comm, int* error);
  int (*machine)(const char* field, long value);
  void (*reset)(void);
};
extern struct cuda_calls cuda;
extern const char* backend_path;

enum { kToDevice = 1, kToHost = 2 };          /* cudaMemcpyKind */
enum { kCaptureGlobal = 0, kInProgress = 7 }; /* cudaStreamCaptureMode, ncclResult_t */

#define CHECK_CUDA(call) CHECK((call) == 0)

static inline cpattn_cuda_options options_of(int device) {
  cpattn_cuda_options options = cpattn_cuda_options_init();
  options.device = device;
  options.backend = backend_path;
  return options;
}

/* The same ranks, each with the GPU of its number. */
static inline cpattn_group* on_gpus(cpattn_group* group, cpattn_exchange exchange) {
  cpattn_cuda_options options = options_of(0);
  cpattn_group* gpus = NULL;
  CHECK_OK(cpattn_group_rank(group, &options.device));
  options.exchange = exchange;
  CHECK_OK(cpattn_group_on_cuda(group, &options, &gpus));
  return gpus;
}

static inline void* to_device(const void* host, size_t size) {
  void* memory = NULL;
  CHECK_CUDA(cuda.malloc(&memory, size > 0 ? size : 16));
  CHECK_CUDA(cuda.copy(memory, host, size, kToDevice));
  return memory;
}

/* One rank's tensors in device memory, bf16 [rows, heads, kDim]; lse f32 [rows, kHeads]. */
struct device_tensors {
  int64_t rows;
  void *q, *k, *v, *out, *lse, *dout, *dq, *dk, *dv;
  float* head_maxima;
  void* stream;
};

static inline size_t wide_size(int64_t rows) { return (size_t)rows * kHeads * kDim * 2; }
static inline size_t narrow_size(int64_t rows) { return (size_t)rows * kKvHeads * kDim * 2; }

/* The bf16 pattern of a number: the upper half of the float's. */
static inline uint16_t bf16(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

/* Rows `rows` of a tensor whose elements are drawn from the seed, in device memory. */
static inline void fill_rows(void* memory, unsigned seed, const int64_t* rows, int64_t count,
                             size_t width) {
  uint16_t* values = allocate((size_t)count * width, sizeof(uint16_t));
  for (int64_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < width; ++j)
      values[(size_t)i * width + j] = bf16(number(seed, (size_t)rows[i] * width + j));
  }
  CHECK_CUDA(cuda.copy(memory, values, (size_t)count * width * sizeof(uint16_t), kToDevice));
  free(values);
}

static inline void fill_inputs(struct device_tensors* t, unsigned seed, const int64_t* rows) {
  fill_rows(t->q, seed + 1, rows, t->rows, kHeads * kDim);
  fill_rows(t->k, seed + 2, rows, t->rows, kKvHeads * kDim);
  fill_rows(t->v, seed + 3, rows, t->rows, kKvHeads * kDim);
  fill_rows(t->dout, seed + 4, rows, t->rows, kHeads * kDim);
}

static inline struct device_tensors make_device_tensors(int device, int64_t rows) {
  struct device_tensors t = {rows, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL};
  void** const wides[] = {&t.q, &t.out, &t.dout, &t.dq};
  void** const narrows[] = {&t.k, &t.v, &t.dk, &t.dv};
  CHECK_CUDA(cuda.set_device(device));
  for (int i = 0; i < 4; ++i) {
    CHECK_CUDA(cuda.malloc(wides[i], wide_size(rows) + 64));
    CHECK_CUDA(cuda.malloc(narrows[i], narrow_size(rows) + 64));
  }
  CHECK_CUDA(cuda.malloc(&t.lse, ((size_t)rows * kHeads + 16) * sizeof(float)));
  void* maxima = NULL;
  CHECK_CUDA(cuda.malloc(&maxima, kHeads * sizeof(float)));
  t.head_maxima = maxima;
  CHECK_CUDA(cuda.stream_create(&t.stream));
  return t;
}

static inline void free_device_tensors(struct device_tensors* t) {
  void* all[] = {t->q, t->k, t->v, t->out, t->lse, t->dout, t->dq, t->dk, t->dv, t->head_maxima};
  CHECK_CUDA(cuda.stream_destroy(t->stream));
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) CHECK_CUDA(cuda.free(all[i]));
}

static inline cpattn_tensor device_tensor(const void* memory, int64_t rows, int64_t heads) {
  return cpattn_contiguous(memory, CPATTN_BF16, rows, heads, kDim);
}

static inline cpattn_forward_tensors forward_on(const struct device_tensors* t) {
  cpattn_forward_tensors f = cpattn_forward_tensors_init();
  f.q = device_tensor(t->q, t->rows, kHeads);
  f.k = device_tensor(t->k, t->rows, kKvHeads);
  f.v = device_tensor(t->v, t->rows, kKvHeads);
  f.out = device_tensor(t->out, t->rows, kHeads);
  f.lse = cpattn_contiguous_matrix(t->lse, t->rows, kHeads);
  f.head_maxima = t->head_maxima;
  f.stream = t->stream;
  return f;
}

static inline cpattn_backward_tensors backward_on(const struct device_tensors* t) {
  cpattn_backward_tensors b = cpattn_backward_tensors_init();
  b.q = device_tensor(t->q, t->rows, kHeads);
  b.k = device_tensor(t->k, t->rows, kKvHeads);
  b.v = device_tensor(t->v, t->rows, kKvHeads);
  b.out = device_tensor(t->out, t->rows, kHeads);
  b.lse = cpattn_contiguous_matrix(t->lse, t->rows, kHeads);
  b.dout = device_tensor(t->dout, t->rows, kHeads);
  b.dq = device_tensor(t->dq, t->rows, kHeads);
  b.dk = device_tensor(t->dk, t->rows, kKvHeads);
  b.dv = device_tensor(t->dv, t->rows, kKvHeads);
  b.stream = t->stream;
  return b;
}

/* The packed documents of packed_plan(), bf16. */
static inline cpattn_plan* device_plan(cpattn_group* group) {
  cpattn_attention* attention = attention_on(group);
  cpattn_problem problem = usual_problem();
  problem.dtype = CPATTN_BF16;
  problem.out_dtype = CPATTN_BF16;
  problem.num_documents = 3;
  problem.cu_seqlens_q = kCuSeqlens;
  cpattn_plan* plan = NULL;
  CHECK_OK(cpattn_plan_create(attention, &problem, &plan));
  CHECK_OK(cpattn_attention_free(&attention));
  return plan;
}

/* c_api_cuda_memory.c */
void test_rows(void);
void test_allocator(void);

/* c_api_cuda_refusals.c */
void test_machines(void);
void test_nccl_communicators(void);
void test_tensors(void);
void test_captures(void);
