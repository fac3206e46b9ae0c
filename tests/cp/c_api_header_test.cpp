// That it compiles as C++ is the test.
#include <cpattn.h>

cpattn_status compiled() {
  const cpattn_problem problem = cpattn_problem_init();
  return problem.struct_size == sizeof problem ? CPATTN_OK : CPATTN_INTERNAL_ERROR;
}
