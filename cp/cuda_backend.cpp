#include "cp/cuda_backend.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <system_error>

#include "src/base/error.h"

namespace cpattn {
namespace {

namespace fs = std::filesystem;

constexpr const char* kInstalledName = "libcpattn_cuda.so";

/// Where it lies, seen from the file that holds this code: beside the library and the Python
/// module, in the folder of libraries seen from a program's.
constexpr const char* kFolders[] = {".", "../lib", CP_LIBRARIES_SEEN_FROM_PROGRAMS};

std::string system_text() {
  const char* text = ::dlerror();
  return text == nullptr ? "no reason given" : text;
}

/// The file that holds this code, links resolved: libcpattn.so, a Python module, a program.
fs::path own_file() {
  Dl_info symbol{};
  link_map* object = nullptr;
  const auto* here = reinterpret_cast<const void*>(&own_file);
  if (::dladdr1(here, &symbol, reinterpret_cast<void**>(&object), RTLD_DL_LINKMAP) == 0) return {};
  const bool is_program = object->l_name[0] == '\0';
  std::error_code error;
  return fs::canonical(is_program ? "/proc/self/exe" : object->l_name, error);
}

/// The one that belongs to this code; "" when there is none.
std::string installed_beside(const fs::path& own) {
  std::error_code error;
  for (const char* folder : kFolders) {
    const fs::path file = own.parent_path() / folder / kInstalledName;
    if (fs::exists(file, error)) return file.lexically_normal().string();
  }
  return "";
}

}  // namespace

std::shared_ptr<CudaBackend> CudaBackend::open(const std::string& path) {
  std::string name = path, where;
  if (path.empty()) {
    const fs::path own = own_file();
    name = installed_beside(own);
    if (name.empty()) {
      name = kInstalledName;
      where = detail::concat("not installed with ", own.string(), "; the system says: ");
    }
  }
  // Never closed: threads of CUDA and NCCL may outlive what started them, and code that is theirs
  // must stay.
  void* object = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (object == nullptr) {
    const std::string text = system_text();
    const bool is_of_another = text.find(name) == std::string::npos;
    throw Unsupported(detail::concat(
        "CUDA backend ", name, ": ", where, text,
        is_of_another ? " (a library that it needs; LD_LIBRARY_PATH may name its folder)" : ""));
  }
  const auto make = reinterpret_cast<MakeCudaBackend>(::dlsym(object, kCudaBackendSymbol));
  require<Unsupported>(make != nullptr, "CUDA backend ", name, ": ", system_text());
  std::shared_ptr<CudaBackend> backend(make(kCudaBackendInterface));
  require<Unsupported>(backend != nullptr, "CUDA backend ", name, " was built for another version");
  return backend;
}

}  // namespace cpattn
