#include "overlap/contract/encoded_candidates.h"

namespace tandem {

OpDesc encoded(OpDesc desc, const OverlapOptions& options) {
  desc.wire = options.wire;
  desc.allow_uncompressed = options.allow_uncompressed && !options.wire.is_none();
  return desc;
}

std::vector<Candidate> uncompressed_and_encoded(
    const OpDesc& desc, const std::function<std::vector<Candidate>(bool encoded)>& made) {
  if (desc.wire.is_none()) return made(false);
  std::vector<Candidate> all = desc.allow_uncompressed ? made(false) : std::vector<Candidate>{};
  for (Candidate& candidate : made(true)) {
    candidate.name += " as " + desc.wire.describe();
    candidate.encoded = true;
    all.push_back(std::move(candidate));
  }
  return all;
}

}  // namespace tandem
