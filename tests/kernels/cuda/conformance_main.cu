// Prints the conformance report: `diff tests/goldens/cuda_conformance.txt <(cuda_conformance)` on a
// device. --words: with all words, to see where a digest differs.
#include <cstdio>
#include <cstring>
#include <exception>

#include "tests/kernels/cuda/conformance.h"
#if !defined(__CUDACC__)
#include "kernels/cuda/host/executor.h"
#endif

int main(int argc, char** argv) {
  const bool with_words = argc > 1 && std::strcmp(argv[1], "--words") == 0;
  try {
#if defined(__CUDACC__)
    const cudaStream_t stream = nullptr;
#else
    cpattn::cuda_host::Executor executor;
    const cudaStream_t stream = &executor;
#endif
    const std::string portable = cpattn::cuda::report_portable(stream);
    std::fputs(portable.c_str(), stdout);
    const std::string sm90 = cpattn::cuda::report_sm90(stream, with_words);
    std::fputs(sm90.c_str(), stdout);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_conformance: %s\n", error.what());
    return 1;
  }
  return 0;
}
