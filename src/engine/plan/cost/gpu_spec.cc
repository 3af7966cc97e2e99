#include "engine/plan/cost/gpu_spec.h"

#include <array>

namespace tandem::plan {
namespace {

constexpr double kTera = 1e12, kGiga = 1e9;

constexpr std::array kGpus{
    GpuSpec{"A100", "A100", 312 * kTera, 312 * kTera, 80 * kGiga, 2039 * kGiga, 300 * kGiga,
            25 * kGiga},
    GpuSpec{"A100-40GB", "A100", 312 * kTera, 312 * kTera, 40 * kGiga, 1555 * kGiga, 300 * kGiga,
            25 * kGiga},
    GpuSpec{"H100", "H100", 989 * kTera, 1979 * kTera, 80 * kGiga, 3350 * kGiga, 450 * kGiga,
            50 * kGiga},
    GpuSpec{"H100-96GB-HBM2e-500W", "H100-500W", 989 * kTera, 1979 * kTera, 96 * kGiga,
            2400 * kGiga, 450 * kGiga, 50 * kGiga},
    GpuSpec{"H200", "H200", 989 * kTera, 1979 * kTera, 141 * kGiga, 4800 * kGiga, 450 * kGiga,
            50 * kGiga},
    GpuSpec{"B200", "B200", 2250 * kTera, 4500 * kTera, 180 * kGiga, 8000 * kGiga, 900 * kGiga,
            50 * kGiga},
};

}  // namespace

std::optional<GpuSpec> find_gpu(std::string_view name) {
  std::optional<GpuSpec> found;
  for (const GpuSpec& spec : kGpus) {
    if (name.starts_with(spec.name) && (!found || spec.name.size() > found->name.size()))
      found = spec;
  }
  return found;
}

}  // namespace tandem::plan
