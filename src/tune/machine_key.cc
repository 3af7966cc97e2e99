#include "tune/machine_key.h"

#include <dnnl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/world/gpus.h"
#include "core/system/isa_level.h"
#include "core/system/machine.h"
#include "core/version.h"

namespace tandem {
namespace {

std::string describe_build() {
  return fmt::format("{} {}, {}, {}{}{}{}{}", kCommit, kBuildType, kCompiler,
                     kNative ? "native " : "", kIsaLevel, *kSanitizers ? " " : "", kSanitizers,
                     *kMpiVersion ? fmt::format(", {}", kMpiVersion) : "");
}

std::string describe_cpu() {
  const Machine machine = this_machine();
  const dnnl_version_t* dnnl = dnnl_version();
  return fmt::format("{}, {} cores, {}, oneDNN {}.{}.{} ISA {:x}", machine.cpu, machine.threads,
                     fmt::join(machine.features, " "), dnnl->major, dnnl->minor, dnnl->patch,
                     unsigned(dnnl_get_effective_cpu_isa()));
}

std::string describe_gpus() {
  std::string text;
  for (const auto& [name, version] : this_machines_gpus().versions) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, version);
  }
  return text;
}

}  // namespace

std::string machine_key(const Communicator& comm) {
  return fmt::format("{} | {}", comm.on_gpu() ? describe_gpus() : describe_cpu(), describe_build());
}

}  // namespace tandem
