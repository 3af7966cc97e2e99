// Hardware that a run is planned for: a known GPU, or a TOML file.
#pragma once

#include <string>

#include "engine/plan/cost/gpu_spec.h"

namespace tandem::plan {

/// A known GPU with the links of its usual hosts (gpu_presets), or else what a file says:
///   gpu = "H100"          # one of gpu_presets(): rates of its data sheet
///   gpus_per_host = 8
///   [link]                # GB/s of a GPU in one direction
///   host = 450
///   network = 50
/// and optionally memory_gib, link.learners. Throws InvalidArgument for a name that is neither,
/// IoError, or ConfigError that names the file and the key.
GpuSpec read_hardware(const std::string& name_or_path);

}  // namespace tandem::plan
