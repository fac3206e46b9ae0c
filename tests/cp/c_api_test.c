/* The C face from C11, alone and under mpirun: the same bits as one rank, refusals on all ranks. */
#include "tests/cp/c_api_checks.h"

int world_rank = 0;
int world_size = 1;

static void check_rows(const float* whole, const float* own, const int64_t* rows, int64_t count,
                       size_t width) {
  for (int64_t i = 0; i < count; ++i)
    CHECK(memcmp(whole + (size_t)rows[i] * width, own + (size_t)i * width, width * sizeof(float)) ==
          0);
}

/* The same bits as one rank that has everything. */
static void test_same_bits_as_one_rank(void) {
  cpattn_group *alone = NULL, *group = everybody();
  CHECK_OK(cpattn_group_self(&alone));
  cpattn_plan *whole_plan = packed_plan(alone), *plan = packed_plan(group);

  struct tensors whole = make_tensors(kTokens);
  for (size_t i = 0; i < kTokens * kHeads * kDim; ++i) {
    whole.q[i] = number(1, i);
    whole.dout[i] = number(4, i);
  }
  for (size_t i = 0; i < kTokens * kKvHeads * kDim; ++i) {
    whole.k[i] = number(2, i);
    whole.v[i] = number(3, i);
  }
  cpattn_forward_tensors forward = forward_of(&whole);
  cpattn_backward_tensors backward = backward_of(&whole);
  CHECK_OK(cpattn_forward(whole_plan, &forward));
  CHECK_OK(cpattn_backward(whole_plan, &backward));

  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  int64_t* rows = allocate((size_t)count, sizeof(int64_t));
  CHECK_OK(cpattn_plan_global_rows(plan, CPATTN_Q, rows, (size_t)count));
  struct tensors own = make_tensors(count);
  const cpattn_tensor globals[] = {wide(whole.q, kTokens), narrow(whole.k, kTokens),
                                   narrow(whole.v, kTokens), wide(whole.dout, kTokens)};
  const cpattn_tensor locals[] = {wide(own.q, count), narrow(own.k, count), narrow(own.v, count),
                                  wide(own.dout, count)};
  const cpattn_side sides[] = {CPATTN_Q, CPATTN_KV, CPATTN_KV, CPATTN_Q};
  for (int i = 0; i < 4; ++i) CHECK_OK(cpattn_plan_shard(plan, sides[i], &globals[i], &locals[i]));
  forward = forward_of(&own);
  backward = backward_of(&own);
  for (int layer = 0; layer < 2; ++layer) {
    CHECK_OK(cpattn_forward(plan, &forward));
    CHECK_OK(cpattn_backward(plan, &backward));
  }
  check_rows(whole.out, own.out, rows, count, kHeads * kDim);
  check_rows(whole.lse, own.lse, rows, count, kHeads);
  check_rows(whole.dq, own.dq, rows, count, kHeads * kDim);
  check_rows(whole.dk, own.dk, rows, count, kKvHeads * kDim);
  check_rows(whole.dv, own.dv, rows, count, kKvHeads * kDim);

  /* And back again: every rank has every row. */
  struct tensors gathered = make_tensors(kTokens);
  const cpattn_tensor from = wide(own.out, count), to = wide(gathered.out, kTokens);
  CHECK_OK(cpattn_plan_all_gather(plan, CPATTN_Q, &from, &to));
  CHECK(memcmp(gathered.out, whole.out, kTokens * kHeads * kDim * sizeof(float)) == 0);
  const cpattn_tensor into = wide(gathered.q, kTokens);
  CHECK_OK(cpattn_plan_unshard(plan, CPATTN_Q, &locals[0], &into));
  check_rows(gathered.q, own.q, rows, count, kHeads * kDim);

  free_tensors(&gathered);
  free_tensors(&own);
  free_tensors(&whole);
  free(rows);
  CHECK_OK(cpattn_plan_free(&plan));
  CHECK_OK(cpattn_plan_free(&whole_plan));
  CHECK_OK(cpattn_group_free(&alone));
  CHECK_OK(cpattn_group_free(&group));
}

/* What one rank passes wrongly is refused on all; then everything works again. */
static void test_refused_together(void) {
  cpattn_group* group = everybody();
  cpattn_attention* attention = attention_on(group);
  cpattn_problem problem = usual_problem();
  cpattn_plan* plan = NULL;
  const int is_culprit = world_rank == world_size - 1;
  char culprit[32];
  snprintf(culprit, sizeof culprit, "rank %d: ", world_size - 1);
  CHECK_REFUSED(cpattn_plan_create(attention, is_culprit ? NULL : &problem, &plan),
                CPATTN_INVALID_ARGUMENT, culprit);
  CHECK_OK(cpattn_plan_create(attention, &problem, &plan));

  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  struct tensors own = make_tensors(count);
  cpattn_forward_tensors forward = forward_of(&own);
  cpattn_backward_tensors backward = backward_of(&own);
  CHECK_REFUSED(cpattn_forward(plan, is_culprit ? NULL : &forward), CPATTN_INVALID_ARGUMENT,
                culprit);
  if (is_culprit) forward.k.strides[2] = 2;
  CHECK_REFUSED(cpattn_forward(plan, &forward), CPATTN_INVALID_ARGUMENT, culprit);
  if (is_culprit) forward = forward_of(&own);
  CHECK_OK(cpattn_forward(plan, &forward));
  CHECK_REFUSED(cpattn_backward(plan, is_culprit ? NULL : &backward), CPATTN_INVALID_ARGUMENT,
                culprit);
  if (is_culprit) backward.dk.dtype = (cpattn_dtype)9;
  CHECK_REFUSED(cpattn_backward(plan, &backward), CPATTN_INVALID_ARGUMENT, culprit);
  if (is_culprit) backward = backward_of(&own);
  CHECK_OK(cpattn_backward(plan, &backward));
  const cpattn_tensor local = wide(own.out, count);
  CHECK_REFUSED(cpattn_plan_all_gather(plan, CPATTN_Q, &local, NULL), CPATTN_INVALID_ARGUMENT,
                "global: NULL");
  float* all = allocate(kTokens * kHeads * kDim, sizeof(float));
  const cpattn_tensor global = wide(all, kTokens);
  cpattn_tensor no_type = local;
  no_type.dtype = (cpattn_dtype)9;
  CHECK_REFUSED(cpattn_plan_all_gather(plan, CPATTN_Q, is_culprit ? &no_type : &local, &global),
                CPATTN_INVALID_ARGUMENT, culprit);
  CHECK(strstr(cpattn_last_error(), "local: dtype 9") != NULL);
  CHECK_REFUSED(
      cpattn_plan_all_gather(plan, is_culprit ? (cpattn_side)5 : CPATTN_Q, &local, &global),
      CPATTN_INVALID_ARGUMENT, culprit);
  CHECK_REFUSED(cpattn_plan_all_gather(plan, CPATTN_Q, is_culprit ? NULL : &local, &global),
                CPATTN_INVALID_ARGUMENT, culprit);
  CHECK_OK(cpattn_plan_all_gather(plan, CPATTN_Q, &local, &global));
  free(all);

  cpattn_sum* sum = NULL;
  float total = 0.0f;
  CHECK_OK(cpattn_sum_create(CPATTN_SUM_FLOAT, 1, 1, &sum));
  CHECK_REFUSED(cpattn_sum_all_reduce(sum, group, &total, 1, is_culprit ? -1.0 : 30.0),
                CPATTN_INVALID_ARGUMENT, culprit);
  CHECK(strstr(cpattn_last_error(), "timeout_seconds is -1") != NULL);
  CHECK_REFUSED(cpattn_sum_all_reduce(sum, group, is_culprit ? NULL : &total, 1, 30.0),
                CPATTN_INVALID_ARGUMENT, culprit);
  CHECK_OK(cpattn_sum_all_reduce(sum, group, &total, 1, 30.0));
  CHECK_OK(cpattn_sum_free(&sum));
  free_tensors(&own);
  CHECK_OK(cpattn_plan_free(&plan));
  CHECK_OK(cpattn_attention_free(&attention));
  CHECK_OK(cpattn_group_free(&group));
}

/* Without rows no stride leads anywhere: all may be 0, as numpy's are. */
static void test_strides_without_rows(void) {
  cpattn_group* group = everybody();
  cpattn_attention* attention = attention_on(group);
  cpattn_problem problem = usual_problem();
  problem.q_rows = 0;
  problem.kv_rows = 0;
  cpattn_plan* plan = NULL;
  CHECK_OK(cpattn_plan_create(attention, &problem, &plan));
  struct tensors none = make_tensors(0);
  cpattn_forward_tensors forward = forward_of(&none);
  cpattn_backward_tensors backward = backward_of(&none);
  cpattn_tensor* tensors[] = {&forward.q,     &forward.k,   &forward.v,   &forward.out,
                              &backward.q,    &backward.k,  &backward.v,  &backward.out,
                              &backward.dout, &backward.dq, &backward.dk, &backward.dv};
  for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; ++i)
    memset(tensors[i]->strides, 0, sizeof tensors[i]->strides);
  CHECK_OK(cpattn_forward(plan, &forward));
  CHECK_OK(cpattn_backward(plan, &backward));
  CHECK_OK(cpattn_plan_shard(plan, CPATTN_Q, &forward.q, &forward.q));
  CHECK_OK(cpattn_plan_all_gather(plan, CPATTN_KV, &forward.k, &forward.k));
  free_tensors(&none);
  CHECK_OK(cpattn_plan_free(&plan));
  CHECK_OK(cpattn_attention_free(&attention));
  CHECK_OK(cpattn_group_free(&group));
}

static void test_tools(void) {
  cpattn_group* group = everybody();
  cpattn_plan* plan = packed_plan(group);
  int64_t count = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  int64_t* rows = allocate((size_t)count, sizeof(int64_t));
  int64_t* places = allocate((size_t)count, sizeof(int64_t));
  int64_t* targets = allocate((size_t)count, sizeof(int64_t));
  int64_t tokens[kTokens], cu_seqlens[4];
  for (int i = 0; i < kTokens; ++i) tokens[i] = 1000 + i;
  CHECK_OK(cpattn_plan_global_rows(plan, CPATTN_Q, rows, (size_t)count));
  CHECK_OK(cpattn_plan_positions(plan, CPATTN_Q, places, (size_t)count));
  CHECK_OK(cpattn_plan_next_token_targets(plan, tokens, kTokens, -100, targets, (size_t)count));
  CHECK_OK(cpattn_plan_local_cu_seqlens(plan, CPATTN_Q, cu_seqlens, 4));
  CHECK(cu_seqlens[0] == 0 && cu_seqlens[1] == cu_seqlens[2] && cu_seqlens[3] == count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = rows[i] < 40 ? 0 : 40, end = rows[i] < 40 ? 40 : 67;
    CHECK(places[i] == rows[i] - begin);
    CHECK(targets[i] == (rows[i] + 1 < end ? 1000 + rows[i] + 1 : -100));
  }
  if (count > 0)
    CHECK_REFUSED(cpattn_plan_positions(plan, CPATTN_Q, places, (size_t)count - 1),
                  CPATTN_INVALID_ARGUMENT, "capacity");
  CHECK_REFUSED(cpattn_plan_num_rows(plan, (cpattn_side)5, &count), CPATTN_INVALID_ARGUMENT,
                "side 5");
  free(rows);
  free(places);
  free(targets);
  CHECK_OK(cpattn_plan_free(&plan));
  CHECK_OK(cpattn_group_free(&group));
}

/* The same sum over tokens as one rank: bit for bit. */
static float ordered_sum_of(cpattn_plan* plan, cpattn_group* group) {
  size_t num_local = 0;
  int64_t num_leaves = 0, count = 0;
  CHECK_OK(cpattn_plan_leaves(plan, NULL, 0, &num_local, &num_leaves));
  CHECK(num_leaves == 5 + 0 + 4);
  cpattn_leaf* leaves = allocate(num_local, sizeof(cpattn_leaf));
  CHECK_OK(cpattn_plan_leaves(plan, leaves, num_local, &num_local, &num_leaves));
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &count));
  int64_t* rows = allocate((size_t)count, sizeof(int64_t));
  CHECK_OK(cpattn_plan_global_rows(plan, CPATTN_Q, rows, (size_t)count));
  cpattn_sum* sum = NULL;
  CHECK_OK(cpattn_sum_create(CPATTN_SUM_FLOAT, num_leaves, 1, &sum));
  for (size_t i = 0; i < num_local; ++i) {
    float partial = 0.0f;
    for (int64_t row = 0; row < leaves[i].num_rows; ++row)
      partial += number(9, (size_t)rows[leaves[i].begin + row]);
    CHECK_OK(cpattn_sum_add(sum, leaves[i].leaf, &partial, 1));
  }
  float result = NAN;
  CHECK_OK(cpattn_sum_all_reduce(sum, group, &result, 1, 30.0));
  CHECK_OK(cpattn_sum_free(&sum));
  free(leaves);
  free(rows);
  return result;
}

static void test_ordered_sum(void) {
  cpattn_group *alone = NULL, *group = everybody();
  CHECK_OK(cpattn_group_self(&alone));
  cpattn_plan *whole_plan = packed_plan(alone), *plan = packed_plan(group);
  const float expected = ordered_sum_of(whole_plan, alone), found = ordered_sum_of(plan, group);
  CHECK(memcmp(&expected, &found, sizeof found) == 0);

  cpattn_sum* sum = NULL;
  double values[2] = {1.5, 2.5}, result[2] = {0, 0};
  CHECK_REFUSED(cpattn_sum_create((cpattn_sum_type)4, 1, 1, &sum), CPATTN_INVALID_ARGUMENT,
                "type 4");
  CHECK_OK(cpattn_sum_create(CPATTN_SUM_DOUBLE, world_size, 2, &sum));
  CHECK_OK(cpattn_sum_add(sum, world_rank, values, 2));
  CHECK_OK(cpattn_sum_all_reduce(sum, group, result, 2, 30.0));
  CHECK(result[0] == 1.5 * world_size && result[1] == 2.5 * world_size);
  CHECK_OK(cpattn_sum_add(sum, world_rank, values, 1));
  CHECK_REFUSED(cpattn_sum_all_reduce(sum, group, result, 2, 30.0), CPATTN_INVALID_ARGUMENT,
                "1 numbers, expected 2");
  CHECK_OK(cpattn_sum_free(&sum));
  CHECK_OK(cpattn_plan_free(&plan));
  CHECK_OK(cpattn_plan_free(&whole_plan));
  CHECK_OK(cpattn_group_free(&alone));
  CHECK_OK(cpattn_group_free(&group));
}

/* Two groups in two threads of one process; each thread has its own error text. */
static int thread_body(void* argument) {
  const int id = *(const int*)argument;
  int rank = -1;
  if (id == 1) CHECK_REFUSED(cpattn_group_rank(NULL, &rank), CPATTN_INVALID_ARGUMENT, "NULL");
  if (id == 0) CHECK(strcmp(cpattn_last_error(), "") == 0);
  for (int i = 0; i < 50; ++i) {
    cpattn_group* group = NULL;
    CHECK_OK(cpattn_group_self(&group));
    cpattn_plan* plan = packed_plan(group);
    struct tensors t = make_tensors(kTokens);
    for (int64_t j = 0; j < kTokens * kKvHeads * kDim; ++j) t.v[j] = (float)id;
    cpattn_forward_tensors forward = forward_of(&t);
    CHECK_OK(cpattn_forward(plan, &forward));
    for (int64_t j = 0; j < kTokens * kHeads * kDim; ++j) CHECK(t.out[j] == (float)id);
    free_tensors(&t);
    CHECK_OK(cpattn_plan_free(&plan));
    CHECK_OK(cpattn_group_free(&group));
  }
  return 0;
}

static void test_threads(void) {
  thrd_t threads[2];
  int ids[2] = {0, 1};
  for (int i = 0; i < 2; ++i) CHECK(thrd_create(&threads[i], thread_body, &ids[i]) == thrd_success);
  for (int i = 0; i < 2; ++i) CHECK(thrd_join(threads[i], NULL) == thrd_success);
}

#ifdef CP_TEST_WITH_MPI
/* The group cuts messages: a setting that says otherwise would be without effect. */
static void test_message_limit(MPI_Comm world, const cpattn_group_options* options) {
  const char* const limits[] = {"1024", "1073741824", "4096"}; /* the group's, the default */
  cpattn_group* group = NULL;
  CHECK_OK(cpattn_group_from_mpi(&world, sizeof world, options, &group));
  for (int i = 0; i < 3; ++i) {
    const cpattn_setting setting = {"max_message_bytes", limits[i]};
    const cpattn_problem problem = usual_problem();
    cpattn_attention* attention = NULL;
    cpattn_plan* plan = NULL;
    CHECK_OK(cpattn_attention_create(group, &setting, 1, &attention));
    if (i == 2) {
      CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                    "max_message_bytes is 4096, expected 1024");
    } else {
      CHECK_OK(cpattn_plan_create(attention, &problem, &plan));
    }
    CHECK_OK(cpattn_plan_free(&plan));
    CHECK_OK(cpattn_attention_free(&attention));
  }
  CHECK_OK(cpattn_group_free(&group));
}

static void test_mpi_groups(void) {
  cpattn_group* group = NULL;
  MPI_Comm world = MPI_COMM_WORLD, nobody = MPI_COMM_NULL, half = MPI_COMM_NULL;
  CHECK_REFUSED(cpattn_group_from_mpi(&world, 3, NULL, &group), CPATTN_INVALID_ARGUMENT,
                "size is 3, expected sizeof(MPI_Comm)");
  CHECK_REFUSED(cpattn_group_from_mpi(&nobody, sizeof nobody, NULL, &group),
                CPATTN_INVALID_ARGUMENT, "MPI_COMM_NULL");
  CHECK_REFUSED(cpattn_group_from_mpi(NULL, sizeof world, NULL, &group), CPATTN_INVALID_ARGUMENT,
                "mpi_comm: NULL");
  cpattn_group_options options = cpattn_group_options_init();
  options.max_message_bytes = -1;
  CHECK_REFUSED(cpattn_group_from_mpi(&world, sizeof world, &options, &group),
                CPATTN_INVALID_ARGUMENT, "max_message_bytes -1");
  /* One rank alone: none has a group, and none waits. */
  char culprit[64];
  snprintf(culprit, sizeof culprit, "rank %d: max_message_bytes -1", world_size - 1);
  options.max_message_bytes = world_rank == world_size - 1 ? -1 : 4096;
  CHECK_REFUSED(cpattn_group_from_mpi(&world, sizeof world, &options, &group),
                CPATTN_INVALID_ARGUMENT, culprit);
  if (world_size > 1) {
    options.max_message_bytes = world_rank == world_size - 1 ? 512 : 4096;
    CHECK_REFUSED(cpattn_group_from_mpi(&world, sizeof world, &options, &group),
                  CPATTN_INVALID_ARGUMENT, "max_message_bytes differs between ranks");
  }
  CHECK(group == NULL);
  options.max_message_bytes = 1024;
  test_message_limit(world, &options);
  MPI_Comm_split(world, world_rank % 2, world_rank, &half);
  int rank = -1, size = -1, expected_rank = -1, expected_size = -1;
  MPI_Comm_rank(half, &expected_rank);
  MPI_Comm_size(half, &expected_size);
  CHECK_OK(cpattn_group_from_mpi_fortran((int)MPI_Comm_c2f(half), &options, &group));
  MPI_Comm_free(&half); /* ours is a duplicate */
  CHECK_OK(cpattn_group_rank(group, &rank));
  CHECK_OK(cpattn_group_size(group, &size));
  CHECK(rank == expected_rank && size == expected_size);
  CHECK_OK(cpattn_group_free(&group));
}
#endif

int main(int argc, char** argv) {
  test_basics();
#ifdef CP_TEST_WITH_MPI
  /* Not by CHECK: there is nothing to abort yet. */
  cpattn_group* early = NULL;
  MPI_Comm world = MPI_COMM_WORLD;
  if (cpattn_group_from_mpi(&world, sizeof world, NULL, &early) != CPATTN_INVALID_ARGUMENT ||
      strstr(cpattn_last_error(), "MPI is not running") == NULL)
    return 1;
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  test_mpi_groups();
#else
  (void)argc;
  (void)argv;
#endif
  test_refusals();
  test_tools();
  test_ordered_sum();
  test_refused_together();
  test_strides_without_rows();
  test_same_bits_as_one_rank();
  test_threads();
#ifdef CP_TEST_WITH_MPI
  MPI_Finalize();
#endif
  printf("c_api_test: rank %d of %d: all checks passed\n", world_rank, world_size);
  return 0;
}
