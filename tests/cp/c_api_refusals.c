/* What a single rank of the C face is refused, and how it is told. */
#include "tests/cp/c_api_checks.h"

void test_basics(void) {
  CHECK(strcmp(cpattn_last_error(), "") == 0);
  CHECK(strcmp(cpattn_version(), CP_EXPECTED_VERSION) == 0);
  CHECK(strcmp(cpattn_status_name(CPATTN_COMM_ERROR), "communication error") == 0);
  CHECK(strcmp(cpattn_status_name((cpattn_status)99), "not a status") == 0);
}

static void test_handles(void) {
  cpattn_group* group = NULL;
  cpattn_attention* attention = NULL;
  cpattn_plan* plan = NULL;
  int rank = -1;
  CHECK_REFUSED(cpattn_group_self(NULL), CPATTN_INVALID_ARGUMENT, "group: NULL");
  CHECK_REFUSED(cpattn_group_rank(NULL, &rank), CPATTN_INVALID_ARGUMENT, "group: NULL");
  CHECK_OK(cpattn_group_self(&group));
  CHECK_OK(cpattn_group_rank(group, &rank));
  CHECK(rank == 0);
  CHECK_REFUSED(cpattn_group_rank(group, NULL), CPATTN_INVALID_ARGUMENT, "rank: NULL");
  attention = attention_on(group);

  cpattn_problem problem = usual_problem();
  CHECK_OK(cpattn_plan_create(attention, &problem, &plan));
  cpattn_group* const stale_group = group;
  cpattn_plan* const stale_plan = plan;
  CHECK_OK(cpattn_group_free(&group)); /* what was made from it lives on */
  CHECK(group == NULL);
  CHECK_OK(cpattn_group_free(&group)); /* NULL: nothing to do */
  CHECK_REFUSED(cpattn_group_rank(stale_group, &rank), CPATTN_INVALID_ARGUMENT, "was freed");

  /* A handle of another kind, and what never was one. */
  CHECK_REFUSED(cpattn_forward((cpattn_plan*)(void*)attention, NULL), CPATTN_INVALID_ARGUMENT,
                "plan: this handle is of kind attention, expected plan");
  CHECK_REFUSED(cpattn_group_rank((cpattn_group*)(void*)&rank, &rank), CPATTN_INVALID_ARGUMENT,
                "group: not a handle");

  CHECK_OK(cpattn_attention_free(&attention));
  int64_t rows = 0;
  CHECK_OK(cpattn_plan_num_rows(plan, CPATTN_Q, &rows));
  CHECK(rows == kTokens);
  CHECK_OK(cpattn_plan_free(&plan));
  cpattn_plan* again = stale_plan;
  CHECK_REFUSED(cpattn_plan_free(&again), CPATTN_INVALID_ARGUMENT, "plan: this handle was freed");
  CHECK_REFUSED(cpattn_forward(stale_plan, NULL), CPATTN_INVALID_ARGUMENT, "was freed");
}

static void test_settings(void) {
  cpattn_group* group = NULL;
  cpattn_attention* attention = NULL;
  CHECK_OK(cpattn_group_self(&group));
  const cpattn_setting wrong[] = {
      {"mask", "diagonal"}, {"chunk_tokens", "12x"}, {"colour", "1"}, {"verify_checksum", "1"},
      {"timeout", "1"},     {"timeout", "2"},        {NULL, "1"}};
  CHECK_REFUSED(cpattn_attention_create(group, wrong, 7, &attention), CPATTN_INVALID_ARGUMENT,
                "mask is \"diagonal\", expected full | causal");
  const char* const parts[] = {"chunk_tokens is \"12x\", expected an integer",
                               "unknown key \"colour\": expected one of mask, sharding",
                               "verify_checksum is \"1\", expected true | false",
                               "timeout: set twice", "settings[6]: NULL key or value"};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; ++i)
    CHECK(strstr(cpattn_last_error(), parts[i]) != NULL);
  CHECK(attention == NULL);
  const cpattn_setting right[] = {
      {"sharding", "contiguous"}, {"schedule", "arrival"},     {"threads", "2"},
      {"timeout", "2.5"},         {"verify_checksum", "true"}, {"isa", "generic"}};
  CHECK_OK(cpattn_attention_create(group, right, 6, &attention));
  CHECK_OK(cpattn_attention_free(&attention));
  CHECK_OK(cpattn_attention_create(group, NULL, 0, &attention));
  CHECK_OK(cpattn_attention_free(&attention));
  CHECK_REFUSED(cpattn_attention_create(group, NULL, 1, &attention), CPATTN_INVALID_ARGUMENT,
                "settings: NULL");
  CHECK_OK(cpattn_group_free(&group));
}

static void test_problems(void) {
  cpattn_group* group = NULL;
  cpattn_plan* plan = NULL;
  CHECK_OK(cpattn_group_self(&group));
  cpattn_attention* attention = attention_on(group);
  cpattn_problem problem = usual_problem();
  problem.struct_size = 0;
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "problem.struct_size is 0");
  CHECK_REFUSED(cpattn_plan_create(attention, NULL, &plan), CPATTN_INVALID_ARGUMENT,
                "problem: NULL");
  problem = usual_problem();
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, NULL), CPATTN_INVALID_ARGUMENT,
                "plan: NULL");
  problem.dtype = (cpattn_dtype)7;
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "problem.dtype: dtype 7");
  problem = usual_problem();
  problem.num_kv_heads = 3;
  problem.head_dim = 0;
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "head_dim");
  CHECK(strstr(cpattn_last_error(), "num_kv_heads") != NULL); /* all of it at once */
  problem = usual_problem();
  const int64_t falling[] = {0, 40, 30};
  problem.num_documents = 2;
  problem.cu_seqlens_q = falling;
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "cu_seqlens_q[2]");
  problem.num_documents = INT64_MAX;
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "num_documents 9223372036854775807: expected 0 to ");
  problem.num_documents = 2;
  const cpattn_document overlapping[] = {{0, 10, 0, 10}, {5, 10, 5, 10}};
  problem.documents = overlapping;
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "both set");
  problem.cu_seqlens_q = NULL;
  CHECK(cpattn_plan_create(attention, &problem, &plan) == CPATTN_INVALID_ARGUMENT);
  CHECK(plan == NULL);

  /* The first version's fields are all there is. */
  problem = usual_problem();
  problem.struct_size = offsetof(cpattn_problem, cu_seqlens_kv);
  CHECK_REFUSED(cpattn_plan_create(attention, &problem, &plan), CPATTN_INVALID_ARGUMENT,
                "expected at least");

  /* A caller of a later version: what this one does not know must not be set. */
  struct {
    cpattn_problem known;
    int64_t later;
  } longer;
  memset(&longer, 0, sizeof longer);
  longer.known = usual_problem();
  longer.known.struct_size = sizeof longer;
  CHECK_OK(cpattn_plan_create(attention, &longer.known, &plan));
  CHECK_OK(cpattn_plan_free(&plan));
  longer.later = 1;
  CHECK_REFUSED(cpattn_plan_create(attention, &longer.known, &plan), CPATTN_INVALID_ARGUMENT,
                "this version of the library does not know");
  CHECK_OK(cpattn_attention_free(&attention));
  CHECK_OK(cpattn_group_free(&group));
}

static void test_explain(void) {
  cpattn_group* group = everybody();
  cpattn_attention* attention = attention_on(group);
  cpattn_problem problem = usual_problem();
  size_t size = 0;
  CHECK_OK(cpattn_explain(attention, &problem, NULL, 0, &size));
  char* text = allocate(size, 1);
  CHECK_OK(cpattn_explain(attention, &problem, text, size, &size));
  CHECK(strlen(text) + 1 == size);
  CHECK(strstr(text, "\"is_supported\": true, \"refusals\": []") != NULL);
  CHECK(strstr(text, "\"guarantee\": \"bitwise across CP sizes\"") != NULL);
  free(text);

  problem.num_kv_heads = 3;
  CHECK_OK(cpattn_explain(attention, &problem, NULL, 0, &size));
  text = allocate(size, 1);
  CHECK_OK(cpattn_explain(attention, &problem, text, size, &size));
  CHECK(strstr(text, "\"is_supported\": false") != NULL);
  CHECK(strstr(text, "num_heads is 4, expected a multiple of num_kv_heads = 3") != NULL);
  free(text);
  CHECK_REFUSED(cpattn_explain(attention, NULL, NULL, 0, &size), CPATTN_INVALID_ARGUMENT,
                "problem: NULL");
  CHECK_OK(cpattn_attention_free(&attention));
  CHECK_OK(cpattn_group_free(&group));
}

void test_refusals(void) {
  test_handles();
  test_settings();
  test_problems();
  test_explain();
}
