// Candidates of an operator whose rows may be sent in a wire format.
#pragma once

#include <functional>
#include <vector>

#include "tandem/strategy.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

/// Adds the wire format of `options` to `desc`.
OpDesc encoded(OpDesc desc, const OverlapOptions& options);

/// Candidates of `made` without messages, with them, or both, as the descriptor requires. Encoded
/// candidates come last, named for their wire format.
std::vector<Candidate> uncompressed_and_encoded(
    const OpDesc& desc, const std::function<std::vector<Candidate>(bool encoded)>& made);

}  // namespace tandem
