// Rewrites a file of weights whose experts are separate tensors as one with those of
// engine/model/fused_experts.h, which other programs read.
#pragma once

#include <string>

#include "engine/model/config.h"

namespace tandem {

/// Replaces the file, of all parameters of `config`, in one dtype. Takes as much space again while
/// it runs, and the memory of the largest tensor that is not of experts. Returns the new header's
/// hash; synced. Throws IoError.
std::string fuse_experts(const std::string& path, const ModelConfig& config);

}  // namespace tandem
