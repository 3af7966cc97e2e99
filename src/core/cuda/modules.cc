#include "core/cuda/modules.h"

#include <fmt/format.h>

#include <mutex>
#include <set>
#include <vector>

#include "core/cuda/driver.h"
#include "core/system/log.h"

namespace tandem::gpu {
namespace {

std::vector<const void*>& kernels_of_modules() {
  static std::vector<const void*> kernels;
  return kernels;
}

// Enumeration of a module's functions needs CUDA 12.4.
template <typename Function>
Function function_of_12_4(const char* name) {
  return driver_function<Function>(name, 12040);
}

std::vector<CUfunction> concurrent_functions(CUfunction kernel) {
  static const auto module_of = function_of_12_4<decltype(&cuFuncGetModule)>("cuFuncGetModule");
  static const auto count_of =
      function_of_12_4<decltype(&cuModuleGetFunctionCount)>("cuModuleGetFunctionCount");
  static const auto enumerate =
      function_of_12_4<decltype(&cuModuleEnumerateFunctions)>("cuModuleEnumerateFunctions");
  CUmodule module = nullptr;
  check_driver(module_of(&module, kernel), "cuFuncGetModule");
  unsigned count = 0;
  check_driver(count_of(&count, module), "cuModuleGetFunctionCount");
  std::vector<CUfunction> functions(count);
  check_driver(enumerate(functions.data(), count, module), "cuModuleEnumerateFunctions");
  return functions;
}

}  // namespace

KnownModule::KnownModule(const void* kernel) {
  kernels_of_modules().push_back(kernel);
}

void for_each_kernel(const std::function<void(CUfunction)>& visit) {
  for (const void* kernel : kernels_of_modules()) {
    cudaFunction_t known = nullptr;
    if (cudaGetFuncBySymbol(&known, kernel) != cudaSuccess) {
      cudaGetLastError();  // other architecture
      continue;
    }
    for (const CUfunction function : concurrent_functions(known)) visit(function);
  }
}

void load_modules() {
  static std::mutex mutex;
  static std::set<int> devices;
  const std::lock_guard lock(mutex);
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  if (!devices.insert(device).second) return;
  try {
    const auto load = function_of_12_4<decltype(&cuFuncLoad)>("cuFuncLoad");
    for_each_kernel([&](CUfunction kernel) { check_driver(load(kernel), "cuFuncLoad"); });
  } catch (const Error& error) {
    log_message(LogLevel::warn,
                fmt::format("kernels are loaded at their first launch, which may wait for one that "
                            "waits for a peer: {}",
                            error.what()));
  }
}

}  // namespace tandem::gpu
