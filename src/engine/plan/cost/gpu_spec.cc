#include "engine/plan/cost/gpu_spec.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>

namespace tandem::plan {
namespace {

constexpr double kTera = 1e12, kGiga = 1e9;

char to_lower(char c) {
  return char(std::tolower(static_cast<unsigned char>(c)));
}

// Dense rates; links of the usual hosts: NVLink, or PCIe where there is none; adapters of 200 to
// 800 Gbit/s a GPU in data centers, of 10 Gbit/s a host elsewhere. 8 GPUs a host where not said.
constexpr std::array kGpus{
    GpuSpec{"A100", "A100", 312 * kTera, 312 * kTera, 80 * kGiga, 2039 * kGiga, 300 * kGiga,
            25 * kGiga},
    GpuSpec{"A100-40GB", "A100", 312 * kTera, 312 * kTera, 40 * kGiga, 1555 * kGiga, 300 * kGiga,
            25 * kGiga},
    GpuSpec{"A800", "A100", 312 * kTera, 312 * kTera, 80 * kGiga, 2039 * kGiga, 200 * kGiga,
            25 * kGiga},
    GpuSpec{"H100", "H100", 989 * kTera, 1979 * kTera, 80 * kGiga, 3350 * kGiga, 450 * kGiga,
            50 * kGiga, 8, 50 * kGiga, true},
    GpuSpec{"H100-96GB-HBM2e-500W", "H100-500W", 989 * kTera, 1979 * kTera, 96 * kGiga,
            2400 * kGiga, 450 * kGiga, 50 * kGiga},
    GpuSpec{"H200", "H100", 989 * kTera, 1979 * kTera, 141 * kGiga, 4800 * kGiga, 450 * kGiga,
            50 * kGiga, 8, 50 * kGiga, true},
    GpuSpec{"H800", "H100", 989 * kTera, 1979 * kTera, 80 * kGiga, 3350 * kGiga, 200 * kGiga,
            50 * kGiga},
    GpuSpec{"H20", "H100", 148 * kTera, 296 * kTera, 96 * kGiga, 4000 * kGiga, 450 * kGiga,
            50 * kGiga},
    GpuSpec{"B200", "B200", 2250 * kTera, 4500 * kTera, 180 * kGiga, 8000 * kGiga, 900 * kGiga,
            50 * kGiga},
    GpuSpec{"B300", "B200", 2250 * kTera, 4500 * kTera, 270 * kGiga, 8000 * kGiga, 900 * kGiga,
            100 * kGiga},
    GpuSpec{"GB200", "B200", 2500 * kTera, 5000 * kTera, 186 * kGiga, 8000 * kGiga, 900 * kGiga,
            50 * kGiga, 72},
    GpuSpec{"L40S", "Ada", 362 * kTera, 733 * kTera, 48 * kGiga, 864 * kGiga, 32 * kGiga,
            25 * kGiga},
    GpuSpec{"RTX-4090", "Ada", 165 * kTera, 330 * kTera, 24 * kGiga, 1008 * kGiga, 32 * kGiga,
            1.25 * kGiga / 8},
};

bool is_same_name(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, {}, to_lower, to_lower);
}

}  // namespace

std::optional<GpuSpec> find_gpu(std::string_view name) {
  std::optional<GpuSpec> found;
  for (const GpuSpec& spec : kGpus) {
    if (name.starts_with(spec.name) && (!found || spec.name.size() > found->name.size()))
      found = spec;
  }
  return found;
}

std::optional<GpuSpec> find_gpu_preset(std::string_view name) {
  const auto found = std::ranges::find_if(
      kGpus, [&](const GpuSpec& spec) { return is_same_name(spec.name, name); });
  return found == kGpus.end() ? std::nullopt : std::optional(*found);
}

std::vector<std::string> gpu_presets() {
  std::vector<std::string> names;
  for (const GpuSpec& spec : kGpus) {
    std::ranges::transform(spec.name, std::back_inserter(names.emplace_back()), to_lower);
  }
  return names;
}

}  // namespace tandem::plan
