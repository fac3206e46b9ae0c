/* cpattn.h: context-parallel attention for C. C11; needs no MPI header.
 *
 *   cpattn_group* group = NULL;
 *   cpattn_group_from_mpi(&my_comm, sizeof my_comm, NULL, &group);
 *   cpattn_attention* attention = NULL;
 *   cpattn_setting settings[] = {{"mask", "causal"}, {"threads", "8"}};
 *   cpattn_attention_create(group, settings, 2, &attention);
 *   cpattn_plan* plan = NULL;
 *   cpattn_plan_create(attention, &problem, &plan);          all ranks together
 *   cpattn_forward(plan, &tensors);                          all ranks together, per layer
 *
 * Errors       Every function returns a status, but for the few that cannot fail. When it is not
 *              CPATTN_OK, cpattn_last_error() has the text; outputs are as they were, unless a
 *              peer failed. No C++ exception leaves the library, and nothing ends the process.
 * Collective   All ranks of the group must make the call. What one rank passes wrongly is refused
 *              on all of them, with the same text; only a handle or a communicator that is not
 *              valid is refused by the one rank that has it. A wait for a peer ends after
 *              the "timeout" setting.
 * Handles      Numbers in the guise of pointers: never dereferenced, never used twice. NULL, a
 *              handle that was freed and one of another kind are CPATTN_INVALID_ARGUMENT. Freeing
 *              takes the address of the handle and sets it to NULL; freeing NULL does nothing.
 *              What was made from a handle outlives it: a plan keeps its group.
 * Threads      One thread at a time for everything made from one group. Different groups are
 *              independent (with MPI: if it was initialised for several threads).
 * Structs      Begin with their size: start from cpattn_problem_init() and its like, then set
 *              fields by name. Fields are added at the end only. A library that knows more of them
 *              than its caller takes what cpattn_problem_init() would set; one that knows fewer
 *              refuses (CPATTN_UNSUPPORTED) a struct in which what it does not know is not zero.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---- */

typedef enum cpattn_status {
  CPATTN_OK = 0,
  CPATTN_INVALID_ARGUMENT = 1, /* the caller; nothing was exchanged, everything can be used again */
  CPATTN_UNSUPPORTED = 2,      /* a part that was not compiled in, or that this machine lacks */
  CPATTN_COMM_ERROR = 3,       /* a peer failed or is late; the group must not be used again */
  CPATTN_INTERNAL_ERROR = 4,   /* a bug of ours */
  CPATTN_OUT_OF_MEMORY = 5,
  CPATTN_DEVICE_ERROR = 6 /* a call of CUDA failed: a GPU or its driver */
} cpattn_status;

const char* cpattn_status_name(cpattn_status status);

/* Text of the last call of this thread that failed, "" before that. Valid until the next one. */
const char* cpattn_last_error(void);

/* "1.2.3" */
const char* cpattn_version(void);

/* ---- group: the ranks that share a sequence ---- */

typedef struct cpattn_group cpattn_group;

typedef struct cpattn_group_options {
  size_t struct_size;
  int64_t max_message_bytes; /* longer messages are cut; equal on all ranks, at most 2^31 - 1 */
} cpattn_group_options;
static inline cpattn_group_options cpattn_group_options_init(void) {
  cpattn_group_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.max_message_bytes = INT64_C(1) << 30;
  return options;
}

/* One rank, no transport. */
cpattn_status cpattn_group_self(cpattn_group** group);

/* The ranks of an MPI communicator, whose duplicate is used: collective over it. `mpi_comm` is the
 * address of an MPI_Comm, `size` its sizeof: it differs where the library was built with another
 * MPI. `options` may be NULL. */
cpattn_status cpattn_group_from_mpi(const void* mpi_comm, size_t size,
                                    const cpattn_group_options* options, cpattn_group** group);

/* The same from MPI_Comm_c2f(comm), or an INTEGER of Fortran. */
cpattn_status cpattn_group_from_mpi_fortran(int mpi_comm, const cpattn_group_options* options,
                                            cpattn_group** group);

cpattn_status cpattn_group_rank(cpattn_group* group, int* rank);
cpattn_status cpattn_group_size(cpattn_group* group, int* size);
cpattn_status cpattn_group_free(cpattn_group** group);

/* ---- GPUs ---- */

/* What moves shards between GPUs. */
typedef enum cpattn_exchange {
  CPATTN_EXCHANGE_AUTO = 0, /* NCCL where every rank has a GPU of its own, else the host */
  CPATTN_EXCHANGE_NCCL = 1,
  CPATTN_EXCHANGE_HOST = 2 /* the group's messages, through host memory; cannot be captured */
} cpattn_exchange;

typedef struct cpattn_cuda_options {
  size_t struct_size;
  int device;               /* ordinal, as the CUDA runtime of this process counts */
  cpattn_exchange exchange; /* equal on all ranks */
  void* nccl_comm; /* an ncclComm_t of the same ranks on these GPUs, which nobody else uses while a
                    * plan does and which outlives all plans, and graphs that were captured with
                    * them; NULL: one is made. After a CPATTN_COMM_ERROR it may have been aborted:
                    * do not destroy it then. */
  const char* backend;    /* path of libcpattn_cuda.so; NULL: the one installed beside libcpattn */
  double timeout_seconds; /* of this call, 0.001 to 86400 */
  /* Where plans take device memory from; both NULL: cudaMalloc. `allocate` gives `size` bytes for
   * work of `stream`, a cudaStream_t, at a multiple of 256, or NULL when there are none; the call
   * that needed them is then refused on this rank. `free` is called when no work uses the memory
   * any more: at the latest when the last plan and group are freed. One thread at a time. */
  void* (*allocate)(void* context, size_t size, void* stream);
  void (*free)(void* context, void* memory);
  void* allocator_context; /* what both are called with */
} cpattn_cuda_options;
static inline cpattn_cuda_options cpattn_cuda_options_init(void) {
  cpattn_cuda_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.timeout_seconds = 60.0;
  return options;
}

/* Collective: the same ranks with their shards in the memory of a GPU each. What is made from
 * `cuda_group` takes device pointers, multiples of 16, and a stream with every call; it returns
 * before the work is done. "isa" is refused in its settings, "threads" means nothing. The functions
 * below "what follows the tokens" and the ordered sum take host memory as ever.
 *
 * Refused on all ranks with one text: CPATTN_UNSUPPORTED where a rank has no backend, no driver or
 * one older than the runtime, no GPU, or one older than sm_80; CPATTN_INVALID_ARGUMENT for a device
 * that is not there, two ranks on one GPU with NCCL, an NCCL communicator that was destroyed or is
 * of other ranks or of another GPU. */
cpattn_status cpattn_group_on_cuda(cpattn_group* group, const cpattn_cuda_options* options,
                                   cpattn_group** cuda_group);

/* ---- attention: a group and its settings ---- */

typedef struct cpattn_attention cpattn_attention;

/* Keys and values are those of the configuration page (docs/configuration.md): mask, sharding,
 * schedule, chunk_tokens, threads, timeout, verify_checksum, ...; and isa. An unknown or repeated
 * key and a value that does not parse are refused, all at once. "threads" 0 means 1 here.
 * Messages are cut by the group: where it does, a "max_message_bytes" that is not the group's is
 * refused by cpattn_plan_create(). */
typedef struct cpattn_setting {
  const char* key;
  const char* value;
} cpattn_setting;

cpattn_status cpattn_attention_create(cpattn_group* group, const cpattn_setting* settings,
                                      size_t num_settings, cpattn_attention** attention);
cpattn_status cpattn_attention_free(cpattn_attention** attention);

/* ---- problem: equal on all ranks ---- */

typedef enum cpattn_dtype { CPATTN_F32 = 0, CPATTN_F16 = 1, CPATTN_BF16 = 2 } cpattn_dtype;

/* q rows [q_begin, q_begin + q_tokens) attend to kv rows [kv_begin, kv_begin + kv_tokens). */
typedef struct cpattn_document {
  int64_t q_begin;
  int64_t q_tokens;
  int64_t kv_begin;
  int64_t kv_tokens;
} cpattn_document;

typedef struct cpattn_problem {
  size_t struct_size;
  int64_t num_heads; /* of queries */
  int64_t
      num_kv_heads; /* num_heads is a multiple; query head h reads h / (num_heads / num_kv_heads) */
  int64_t head_dim; /* of q and k */
  int64_t value_dim;     /* of v and out; 0: head_dim */
  int has_softmax_scale; /* 0: 1 / sqrt(head_dim) */
  double softmax_scale;  /* any finite number, 0 included */
  cpattn_dtype dtype;    /* of q, k, v */
  cpattn_dtype out_dtype;
  int64_t q_rows; /* of the whole q, all ranks together */
  int64_t kv_rows;
  /* Who attends to whom, one of: `documents`, `cu_seqlens_q` (num_documents + 1 numbers from 0;
   * cu_seqlens_kv NULL: the same), or neither: one document of all rows. Rows that no document
   * covers are padding: no rank owns them. Read during the call only. */
  int64_t num_documents;
  const cpattn_document* documents;
  const int64_t* cu_seqlens_q;
  const int64_t* cu_seqlens_kv;
} cpattn_problem;
static inline cpattn_problem cpattn_problem_init(void) {
  cpattn_problem problem;
  memset(&problem, 0, sizeof problem);
  problem.struct_size = sizeof problem;
  problem.num_heads = 1;
  problem.num_kv_heads = 1;
  problem.head_dim = 64;
  return problem;
}

/* What would run on this rank and why, or every reason why nothing would, as a JSON object: the
 * members of cpattn::Explanation. Not collective; a problem that is refused is not an error.
 * `*size` becomes the bytes of the text with its end; it is written when `capacity` has room for
 * that, and `text` may be NULL with `capacity` 0 to ask. */
cpattn_status cpattn_explain(cpattn_attention* attention, const cpattn_problem* problem, char* text,
                             size_t capacity, size_t* size);

/* ---- plan: one problem, for any number of layers ---- */

typedef struct cpattn_plan cpattn_plan;

/* Collective. Takes the forward's memory; the first cpattn_backward() takes its own. */
cpattn_status cpattn_plan_create(cpattn_attention* attention, const cpattn_problem* problem,
                                 cpattn_plan** plan);
cpattn_status cpattn_plan_free(cpattn_plan** plan);

/* [tokens, heads, dim]; strides in elements, the last one 1. Inputs are only read. */
typedef struct cpattn_tensor {
  void* data;
  cpattn_dtype dtype;
  int64_t shape[3];
  int64_t strides[3];
} cpattn_tensor;

/* f32 [tokens, heads]; data NULL where it may be absent. */
typedef struct cpattn_matrix {
  float* data;
  int64_t shape[2];
  int64_t strides[2];
} cpattn_matrix;

static inline cpattn_tensor cpattn_contiguous(const void* data, cpattn_dtype dtype, int64_t tokens,
                                              int64_t heads, int64_t dim) {
  union { /* drops const: whether it is written depends on the argument it becomes */
    const void* read;
    void* any;
  } pointer;
  cpattn_tensor tensor;
  pointer.read = data;
  tensor.data = pointer.any;
  tensor.dtype = dtype;
  tensor.shape[0] = tokens;
  tensor.shape[1] = heads;
  tensor.shape[2] = dim;
  tensor.strides[0] = heads * dim;
  tensor.strides[1] = dim;
  tensor.strides[2] = 1;
  return tensor;
}

static inline cpattn_matrix cpattn_contiguous_matrix(const float* data, int64_t tokens,
                                                     int64_t heads) {
  union {
    const float* read;
    float* any;
  } pointer;
  cpattn_matrix matrix;
  pointer.read = data;
  matrix.data = pointer.any;
  matrix.shape[0] = tokens;
  matrix.shape[1] = heads;
  matrix.strides[0] = heads;
  matrix.strides[1] = 1;
  return matrix;
}

/* This rank's rows, in the order of cpattn_plan_global_rows(). */
typedef struct cpattn_forward_tensors {
  size_t struct_size;
  cpattn_tensor q;   /* [q_rows, num_heads, head_dim] */
  cpattn_tensor k;   /* [kv_rows, num_kv_heads, head_dim] */
  cpattn_tensor v;   /* [kv_rows, num_kv_heads, value_dim] */
  cpattn_tensor out; /* written: [q_rows, num_heads, value_dim], out_dtype */
  cpattn_matrix lse; /* written: [q_rows, num_heads] */
  /* [num_heads], contiguous, or NULL: head_maxima[h] becomes the larger of what it was and the
   * largest visible softmax_scale * q.k of this rank's rows, head by head; a NaN stays. Begin with
   * cpattn_reset_head_maxima(); cpattn_max_over_ranks() makes it the group's. */
  float* head_maxima;
  void* stream; /* on a GPU: a cudaStream_t of it, not the legacy default stream; may be in capture.
                 * NULL on the CPU */
} cpattn_forward_tensors;
static inline cpattn_forward_tensors cpattn_forward_tensors_init(void) {
  cpattn_forward_tensors tensors;
  memset(&tensors, 0, sizeof tensors);
  tensors.struct_size = sizeof tensors;
  return tensors;
}

typedef struct cpattn_backward_tensors {
  size_t struct_size;
  cpattn_tensor q, k, v, out; /* as given to, and left by, the forward */
  cpattn_matrix lse;
  cpattn_tensor dout; /* shape of out; its type or f32 */
  cpattn_matrix dlse; /* shape of lse; data NULL: zeros */
  cpattn_tensor dq;   /* written; any type */
  cpattn_tensor dk;
  cpattn_tensor dv;
  void* stream; /* as in the forward */
} cpattn_backward_tensors;
static inline cpattn_backward_tensors cpattn_backward_tensors_init(void) {
  cpattn_backward_tensors tensors;
  memset(&tensors, 0, sizeof tensors);
  tensors.struct_size = sizeof tensors;
  return tensors;
}

/* Collective. Outputs overlap neither inputs nor each other. All memory is where the group's shards
 * are; memory that is elsewhere is refused by name. A capture is all ranks' together, and what is
 * refused in one is refused by the rank that asked for it, for nothing moves then. */
cpattn_status cpattn_forward(cpattn_plan* plan, const cpattn_forward_tensors* tensors);
cpattn_status cpattn_backward(cpattn_plan* plan, const cpattn_backward_tensors* tensors);

/* Collective: takes the backward's memory now, not in the first cpattn_backward(), which without
 * this is refused in a capture. */
cpattn_status cpattn_plan_prepare_backward(cpattn_plan* plan);

/* ---- largest logits ---- */

/* Makes `head_maxima` [num_heads] "nothing observed", -inf: in place; on a GPU in the order of
 * `stream`, which may be in capture. Not collective. */
cpattn_status cpattn_reset_head_maxima(cpattn_plan* plan, float* head_maxima, void* stream);

/* Collective: values[i] becomes the largest values[i] of any rank, the same bits on all of them;
 * -inf is neutral, a NaN of any rank wins. `values` is in the memory of the group's shards; what
 * `stream` was given before is done when they are read, and the result is there for every stream
 * when this returns. Not in a capture. */
cpattn_status cpattn_max_over_ranks(cpattn_group* group, float* values, size_t num_values,
                                    void* stream, double timeout_seconds);

/* ---- what follows the tokens to their ranks ---- */

typedef enum cpattn_side { CPATTN_Q = 0, CPATTN_KV = 1 } cpattn_side;

/* Rows of this rank's q, or of its k and v. */
cpattn_status cpattn_plan_num_rows(cpattn_plan* plan, cpattn_side side, int64_t* num_rows);

/* Of each local row: its row in the global tensor; its position in its document, from 0 (for RoPE;
 * where a document has more keys than queries, a query's last key under a causal mask is at that
 * position + kv_tokens - q_tokens). Both have room for `capacity` numbers, at least
 * cpattn_plan_num_rows(). */
cpattn_status cpattn_plan_global_rows(cpattn_plan* plan, cpattn_side side, int64_t* rows,
                                      size_t capacity);
cpattn_status cpattn_plan_positions(cpattn_plan* plan, cpattn_side side, int64_t* positions,
                                    size_t capacity);

/* Cumulative lengths of what this rank has of each document: num_documents + 1 numbers. */
cpattn_status cpattn_plan_local_cu_seqlens(cpattn_plan* plan, cpattn_side side, int64_t* cu_seqlens,
                                           size_t capacity);

/* Of each local q row, the token after it in its document, `ignore` at a document's end. `tokens`
 * are those of all q rows. */
cpattn_status cpattn_plan_next_token_targets(cpattn_plan* plan, const int64_t* tokens,
                                             size_t num_tokens, int64_t ignore, int64_t* targets,
                                             size_t capacity);

/* Copies this rank's rows out of, or into, a global tensor, in host memory. */
cpattn_status cpattn_plan_shard(cpattn_plan* plan, cpattn_side side, const cpattn_tensor* global,
                                const cpattn_tensor* local);
cpattn_status cpattn_plan_unshard(cpattn_plan* plan, cpattn_side side, const cpattn_tensor* local,
                                  const cpattn_tensor* global);

/* The same in the memory of the group's shards: on a GPU in the order of `stream`, a cudaStream_t
 * of it (NULL on the CPU), which may be in capture once rows of that side were copied: the first
 * call takes a little memory. Not collective. */
cpattn_status cpattn_plan_shard_on_device(cpattn_plan* plan, cpattn_side side,
                                          const cpattn_tensor* global, const cpattn_tensor* local,
                                          void* stream);
cpattn_status cpattn_plan_unshard_on_device(cpattn_plan* plan, cpattn_side side,
                                            const cpattn_tensor* local, const cpattn_tensor* global,
                                            void* stream);

/* Collective: everybody gets all rows. */
cpattn_status cpattn_plan_all_gather(cpattn_plan* plan, cpattn_side side,
                                     const cpattn_tensor* local, const cpattn_tensor* global);

/* Local q rows [begin, begin + num_rows) are leaf `leaf` of a sum over all tokens. */
typedef struct cpattn_leaf {
  int64_t leaf;
  int64_t begin;
  int64_t num_rows;
} cpattn_leaf;

/* `*num_leaves` of all ranks together; `*num_local` of this rank, written to `leaves` when
 * `capacity` has room for them. `leaves` may be NULL with `capacity` 0 to ask. */
cpattn_status cpattn_plan_leaves(cpattn_plan* plan, cpattn_leaf* leaves, size_t capacity,
                                 size_t* num_local, int64_t* num_leaves);

/* ---- ordered sum: the same bits for every number of ranks ---- */

typedef struct cpattn_sum cpattn_sum;
typedef enum cpattn_sum_type { CPATTN_SUM_FLOAT = 0, CPATTN_SUM_DOUBLE = 1 } cpattn_sum_type;

/* The sum of `num_leaves` vectors of `size` numbers, along the canonical tree. */
cpattn_status cpattn_sum_create(cpattn_sum_type type, int64_t num_leaves, int64_t size,
                                cpattn_sum** sum);
cpattn_status cpattn_sum_free(cpattn_sum** sum);

/* Brings a leaf; float or double as the sum's type says. A wrong or repeated leaf is refused by
 * cpattn_sum_all_reduce(), on every rank. */
cpattn_status cpattn_sum_add(cpattn_sum* sum, int64_t leaf, const void* values, size_t num_values);

/* Collective: `result` becomes the sum of what all ranks brought, and the sum is empty again. */
cpattn_status cpattn_sum_all_reduce(cpattn_sum* sum, cpattn_group* group, void* result,
                                    size_t num_values, double timeout_seconds);

#ifdef __cplusplus
}
#endif
