/* What the tests of the C face share. A check that fails names its line and ends the job. */
#pragma once

#include <cpattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>
#ifdef CP_TEST_WITH_MPI
#include <mpi.h>
#endif

extern int world_rank;
extern int world_size;

static inline void fail(const char* what, const char* file, int line) {
  fprintf(stderr, "[rank %d] %s:%d: %s; last error: %s\n", world_rank, file, line, what,
          cpattn_last_error());
#ifdef CP_TEST_WITH_MPI
  MPI_Abort(MPI_COMM_WORLD, 1);
#endif
  exit(1);
}

#define CHECK(condition)                                    \
  do {                                                      \
    if (!(condition)) fail(#condition, __FILE__, __LINE__); \
  } while (0)
#define CHECK_OK(call) CHECK((call) == CPATTN_OK)
/* The call is refused, and its text contains `part`. */
#define CHECK_REFUSED(call, status, part)                                            \
  do {                                                                               \
    CHECK((call) == (status));                                                       \
    if (strstr(cpattn_last_error(), (part)) == NULL) fail(part, __FILE__, __LINE__); \
  } while (0)

static inline void* allocate(size_t count, size_t size) {
  void* memory = calloc(count > 0 ? count : 1, size);
  CHECK(memory != NULL);
  return memory;
}

/* The group of all ranks. */
static inline cpattn_group* everybody(void) {
  cpattn_group* group = NULL;
#ifdef CP_TEST_WITH_MPI
  MPI_Comm world = MPI_COMM_WORLD;
  CHECK_OK(cpattn_group_from_mpi(&world, sizeof world, NULL, &group));
#else
  CHECK_OK(cpattn_group_self(&group));
#endif
  return group;
}

static inline cpattn_attention* attention_on(cpattn_group* group) {
  const cpattn_setting settings[] = {{"mask", "causal"}, {"chunk_tokens", "8"}, {"timeout", "30"}};
  cpattn_attention* attention = NULL;
  CHECK_OK(cpattn_attention_create(group, settings, 3, &attention));
  return attention;
}

enum { kTokens = 67, kHeads = 4, kKvHeads = 2, kDim = 16 };

static inline cpattn_problem usual_problem(void) {
  cpattn_problem problem = cpattn_problem_init();
  problem.num_heads = kHeads;
  problem.num_kv_heads = kKvHeads;
  problem.head_dim = kDim;
  problem.q_rows = kTokens;
  problem.kv_rows = kTokens;
  return problem;
}

/* A number in [-1, 1] from its place. */
static inline float number(unsigned seed, size_t place) {
  unsigned x = seed * 2654435761u + (unsigned)place * 40503u + 12345u;
  for (int i = 0; i < 3; ++i) x = (x ^ (x >> 15)) * 2246822519u;
  return (float)(x >> 8) / 8388608.0f - 1.0f;
}

/* Everything of all tokens, and of the rows of one rank. */
struct tensors {
  int64_t rows;
  float *q, *k, *v, *out, *lse, *dout, *dq, *dk, *dv;
};

static inline struct tensors make_tensors(int64_t rows) {
  const size_t q = (size_t)rows * kHeads * kDim, kv = (size_t)rows * kKvHeads * kDim;
  struct tensors t = {rows, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  t.q = allocate(q, sizeof(float));
  t.k = allocate(kv, sizeof(float));
  t.v = allocate(kv, sizeof(float));
  t.out = allocate(q, sizeof(float));
  t.lse = allocate((size_t)rows * kHeads, sizeof(float));
  t.dout = allocate(q, sizeof(float));
  t.dq = allocate(q, sizeof(float));
  t.dk = allocate(kv, sizeof(float));
  t.dv = allocate(kv, sizeof(float));
  return t;
}

static inline void free_tensors(struct tensors* t) {
  float* all[] = {t->q, t->k, t->v, t->out, t->lse, t->dout, t->dq, t->dk, t->dv};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) free(all[i]);
}

static inline cpattn_tensor wide(const float* data, int64_t rows) {
  return cpattn_contiguous(data, CPATTN_F32, rows, kHeads, kDim);
}
static inline cpattn_tensor narrow(const float* data, int64_t rows) {
  return cpattn_contiguous(data, CPATTN_F32, rows, kKvHeads, kDim);
}

static inline cpattn_forward_tensors forward_of(const struct tensors* t) {
  cpattn_forward_tensors f = cpattn_forward_tensors_init();
  f.q = wide(t->q, t->rows);
  f.k = narrow(t->k, t->rows);
  f.v = narrow(t->v, t->rows);
  f.out = wide(t->out, t->rows);
  f.lse = cpattn_contiguous_matrix(t->lse, t->rows, kHeads);
  return f;
}

static inline cpattn_backward_tensors backward_of(const struct tensors* t) {
  cpattn_backward_tensors b = cpattn_backward_tensors_init();
  b.q = wide(t->q, t->rows);
  b.k = narrow(t->k, t->rows);
  b.v = narrow(t->v, t->rows);
  b.out = wide(t->out, t->rows);
  b.lse = cpattn_contiguous_matrix(t->lse, t->rows, kHeads);
  b.dout = wide(t->dout, t->rows);
  b.dq = wide(t->dq, t->rows);
  b.dk = narrow(t->dk, t->rows);
  b.dv = narrow(t->dv, t->rows);
  return b;
}

/* Packed documents of 40, 0 and 27 tokens. */
static const int64_t kCuSeqlens[] = {0, 40, 40, 67};

static inline cpattn_plan* packed_plan(cpattn_group* group) {
  cpattn_attention* attention = attention_on(group);
  cpattn_problem problem = usual_problem();
  problem.num_documents = 3;
  problem.cu_seqlens_q = kCuSeqlens;
  cpattn_plan* plan = NULL;
  CHECK_OK(cpattn_plan_create(attention, &problem, &plan));
  CHECK_OK(cpattn_attention_free(&attention));
  return plan;
}

/* c_api_refusals.c */
void test_basics(void);
void test_refusals(void);
