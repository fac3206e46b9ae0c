/* Attention over one sequence of 4096 tokens, split over all ranks of MPI_COMM_WORLD. */
#include <cpattn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static void check(cpattn_status status) {
  if (status == CPATTN_OK) return;
  fprintf(stderr, "%s: %s\n", cpattn_status_name(status), cpattn_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static float* filled(int64_t count, float value) {
  float* data = malloc((size_t)(count + 1) * sizeof(float));
  for (int64_t i = 0; i < count; ++i) data[i] = value;
  return data;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm world = MPI_COMM_WORLD;
  cpattn_group* group = NULL;
  check(cpattn_group_from_mpi(&world, sizeof world, NULL, &group));
  const cpattn_setting settings[] = {{"mask", "causal"}, {"threads", "1"}};
  cpattn_attention* attention = NULL;
  check(cpattn_attention_create(group, settings, 2, &attention));

  /* Once per problem: 8 query heads share 2 kv heads of 64 channels. */
  cpattn_problem problem = cpattn_problem_init();
  problem.num_heads = 8;
  problem.num_kv_heads = 2;
  problem.head_dim = 64;
  problem.q_rows = problem.kv_rows = 4096;
  cpattn_plan* plan = NULL;
  check(cpattn_plan_create(attention, &problem, &plan));

  /* This rank's rows, all 0.01 here. */
  int64_t rows = 0;
  check(cpattn_plan_num_rows(plan, CPATTN_Q, &rows));
  float* q = filled(rows * 8 * 64, 0.01f);
  float* kv = filled(rows * 2 * 64, 0.01f);
  float* out = filled(rows * 8 * 64, 0.01f);
  float* lse = filled(rows * 8, 0.0f);

  /* Per layer, all ranks together. */
  cpattn_forward_tensors tensors = cpattn_forward_tensors_init();
  tensors.q = cpattn_contiguous(q, CPATTN_F32, rows, 8, 64);
  tensors.k = tensors.v = cpattn_contiguous(kv, CPATTN_F32, rows, 2, 64);
  tensors.out = cpattn_contiguous(out, CPATTN_F32, rows, 8, 64);
  tensors.lse = cpattn_contiguous_matrix(lse, rows, 8);
  check(cpattn_forward(plan, &tensors));
  int rank = 0, size = 0;
  check(cpattn_group_rank(group, &rank));
  check(cpattn_group_size(group, &size));
  printf("rank %d of %d: %lld rows, out %.6f\n", rank, size, (long long)rows, out[0]);

  check(cpattn_plan_free(&plan));
  check(cpattn_attention_free(&attention));
  check(cpattn_group_free(&group));
  free(q), free(kv), free(out), free(lse);
  MPI_Finalize();
  return 0;
}
