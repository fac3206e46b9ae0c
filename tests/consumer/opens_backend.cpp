// Asks for the CUDA backend as a program of a user does: "opened FILE: ..." or "unsupported: ..."
// and status 3.
#include <cpattn/cuda.h>
#include <cpattn/errors.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace {

/// The file from which the backend was loaded.
std::string loaded_file() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t path = line.find('/');
    if (line.find("/libcpattn_cuda.so") != std::string::npos) return line.substr(path);
  }
  return "none";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto backend = cpattn::CudaBackend::open(argc > 1 ? argv[1] : "");
    std::printf("opened %s: %s\n", loaded_file().c_str(), backend->description().c_str());
    const std::string refusal = backend->refusal();
    if (refusal.empty()) {
      std::printf("%zu devices\n", backend->devices().size());
    } else {
      std::printf("no device: %s\n", refusal.c_str());
    }
    return 0;
  } catch (const cpattn::Unsupported& error) {
    std::printf("unsupported: %s\n", error.what());
    return 3;
  }
}
