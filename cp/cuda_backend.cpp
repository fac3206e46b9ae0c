#include "cp/cuda_backend.h"

#include <dlfcn.h>

#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr const char* kInstalledName = "libcpattn_cuda.so";

std::string system_text() {
  const char* text = ::dlerror();
  return text == nullptr ? "no reason given" : text;
}

}  // namespace

std::shared_ptr<CudaBackend> CudaBackend::open(const std::string& path) {
  const std::string name = path.empty() ? kInstalledName : path;
  // Never closed: threads of CUDA and NCCL may outlive what started them, and code that is theirs
  // must stay.
  void* object = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  require<Unsupported>(object != nullptr, "CUDA backend ", name, ": ", system_text());
  const auto make = reinterpret_cast<MakeCudaBackend>(::dlsym(object, kCudaBackendSymbol));
  require<Unsupported>(make != nullptr, "CUDA backend ", name, ": ", system_text());
  std::shared_ptr<CudaBackend> backend(make(kCudaBackendInterface));
  require<Unsupported>(backend != nullptr, "CUDA backend ", name, " was built for another version");
  return backend;
}

}  // namespace cpattn
