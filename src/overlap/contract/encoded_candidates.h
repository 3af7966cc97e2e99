// Candidates of an operator whose rows may travel in a wire format.
#pragma once

#include <functional>
#include <vector>

#include "tandem/strategy.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

/// With the wire that `options` have.
OpDesc encoded(OpDesc desc, const OverlapOptions& options);

/// What `made` gives without messages, with them, or both, as the descriptor says. Encoded
/// candidates come last, named for their wire.
std::vector<Candidate> plain_and_encoded(
    const OpDesc& desc, const std::function<std::vector<Candidate>(bool encoded)>& made);

}  // namespace tandem
