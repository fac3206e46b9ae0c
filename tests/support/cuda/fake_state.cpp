#include "tests/support/cuda/fake_state.h"

#include <map>
#include <mutex>

namespace cpattn::fake_cuda {
namespace {

Machine the_machine;
cuda_host::Options the_kernel_options;
std::array<std::atomic<int>, kMaxDevices> sticky_errors{};

struct Complaint {
  std::mutex mutex;
  cudaError_t error = cudaSuccess;
  std::string text;
};
Complaint& kept() {
  static auto* const only = new Complaint;  // streams may outlive static objects
  return *only;
}

struct Apis {
  std::mutex mutex;
  std::map<std::string, Api> by_name;
};
Apis& apis() {
  static auto* const only = new Apis;
  return *only;
}

}  // namespace

Counts& counts() {
  static Counts only;
  return only;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

cudaError_t& last_error() {
  thread_local cudaError_t error = cudaSuccess;
  return error;
}

cudaError_t sticky_error(int device) {
  return static_cast<cudaError_t>(
      sticky_errors[static_cast<std::size_t>(device)].load(std::memory_order_relaxed));
}

void set_sticky_error(int device, cudaError_t error) {
  int none = cudaSuccess;
  sticky_errors[static_cast<std::size_t>(device)].compare_exchange_strong(
      none, error, std::memory_order_relaxed);
}

cudaError_t complain(cudaError_t error, std::string text) {
  const std::lock_guard lock(kept().mutex);
  kept().error = error;
  kept().text = std::move(text);
  return error;
}

std::string complaint() {
  const std::lock_guard lock(kept().mutex);
  return kept().text;
}

std::string complaint_about(cudaError_t error) {
  const std::lock_guard lock(kept().mutex);
  return kept().error == error ? kept().text : std::string();
}

const cuda_host::Options& kernel_options() { return the_kernel_options; }
void set_kernel_options(const cuda_host::Options& options) { the_kernel_options = options; }

const Machine& machine() { return the_machine; }
void set_machine(const Machine& machine) {
  require(machine.num_devices >= 0 && machine.num_devices <= kMaxDevices, machine.num_devices,
          " devices; expected 0 to ", kMaxDevices);
  the_machine = machine;
}

Live live() {
  const auto value = [](const Counts::Count& count) {
    return count.load(std::memory_order_relaxed);
  };
  const Counts& now = counts();
  return {.device_allocations = value(now.device_allocations),
          .host_allocations = value(now.host_allocations),
          .streams = value(now.streams),
          .events = value(now.events),
          .graphs = value(now.graphs),
          .graph_execs = value(now.graph_execs),
          .pools = value(now.pools),
          .communicators = value(now.communicators)};
}

std::uint64_t num_pageable_copies() {
  return static_cast<std::uint64_t>(counts().pageable_copies.load(std::memory_order_relaxed));
}

Api& Api::named(const char* name) {
  const std::lock_guard lock(apis().mutex);
  return apis().by_name[name];
}

int Api::enter() {
  num_calls_.fetch_add(1, std::memory_order_relaxed);
  if (calls_left_.load(std::memory_order_relaxed) == 0) return 0;
  const int device = device_.load(std::memory_order_relaxed);
  if (device >= 0 && device != current_device()) return 0;
  int left = calls_left_.load(std::memory_order_relaxed);
  while (left > 0 &&
         !calls_left_.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
  }
  return left == 1 ? error_.load(std::memory_order_relaxed) : 0;
}

void Api::fail_after(int n, int error, int device) {
  error_.store(error, std::memory_order_relaxed);
  device_.store(device, std::memory_order_relaxed);
  calls_left_.store(n, std::memory_order_relaxed);
}

void Api::reset() {
  fail_after(0, 0, -1);
  num_calls_.store(0, std::memory_order_relaxed);
}

cudaError_t Api::finish(cudaError_t error) {
  if (error != cudaSuccess) last_error() = error;  // "not ready", too
  return error;
}

void fail_after(const char* api, int n, cudaError_t error, int device) {
  Api::named(api).fail_after(n, error, device);
}

std::uint64_t num_calls(const char* api) { return Api::named(api).num_calls(); }

void reset() {
  the_machine = {};
  the_kernel_options = {};
  for (std::atomic<int>& error : sticky_errors) error.store(0, std::memory_order_relaxed);
  complain(cudaSuccess, "");
  {
    const std::lock_guard lock(apis().mutex);
    for (auto& [name, api] : apis().by_name) api.reset();
  }
  set_delays(0, 0);
  counts().pageable_copies.store(0, std::memory_order_relaxed);
  current_device() = 0;
  last_error() = cudaSuccess;
}

}  // namespace cpattn::fake_cuda
