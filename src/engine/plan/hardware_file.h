// Hardware that a run is planned for, from a TOML file.
#pragma once

#include <string>

#include "engine/plan/cost/gpu_spec.h"

namespace tandem::plan {

/// Reads
///   gpu = "H100"          # A100, H100, H200 or B200: rates of its data sheet
///   gpus_per_host = 8
///   [link]                # GB/s of a GPU in one direction
///   host = 450
///   network = 50
/// and optionally memory_gib. Throws IoError, or ConfigError that names the file and the key.
GpuSpec read_hardware(const std::string& path);

}  // namespace tandem::plan
