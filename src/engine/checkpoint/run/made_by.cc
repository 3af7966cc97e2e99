#include "engine/checkpoint/run/made_by.h"

#include <dnnl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "core/system/isa_level.h"
#include "core/system/machine.h"
#include "core/system/printable.h"
#include "core/version.h"

namespace tandem {

std::map<std::string, std::string> build_identity() {
  const Machine machine = this_machine();
  const dnnl_version_t* dnnl = dnnl_version();
  return {{"version", kVersion},
          {"commit", kCommit},
          {"compiler", kCompiler},
          {"instruction set", kIsaLevel},
          {"oneDNN", fmt::format("{}.{}.{}", dnnl->major, dnnl->minor, dnnl->patch)},
          {"processor", machine.cpu},
          {"processor features", fmt::format("{}", fmt::join(machine.features, " "))}};
}

std::string describe_change(const std::map<std::string, std::string>& then,
                            const std::map<std::string, std::string>& now) {
  std::vector<std::string> changes;
  for (const auto& [name, value] : now) {
    const auto before = then.find(name);
    if (before == then.end() || before->second == value) continue;
    changes.push_back(fmt::format("{} {}, now {}", name, printable(before->second), value));
  }
  if (changes.empty()) return "";
  return fmt::format(
      "the checkpoint was computed otherwise ({}): the last bits of results may differ",
      fmt::join(changes, "; "));
}

}  // namespace tandem
