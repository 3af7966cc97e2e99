#include "overlap/moe/on_ranks.h"

namespace tandem {

Receipt make_moe_receipt(const char* pass, const MoeRankCoords& coords, const MoeOptions& options) {
  return {
      .op = pass,
      .shape = coords.describe() + saves(options.save) + quantizes(options) + activates(options),
      .dtype = std::string(name_of(coords.shape.dtype)),
      .group = coords.world,
      .asked = options.strategy};
}

void MoeOnRanks::list(const Receipt& forward, const std::optional<Receipt>& backward,
                      const MoeOptions& options) {
  strict_ = options.strict;
  require_as_asked(forward, strict_);
  forward_ = list_receipt(forward);
  if (!backward) return;
  if (options.backward) require_as_asked(*backward, strict_);
  backward_ = list_receipt(*backward);
}

void MoeOnRanks::count_backward() {
  if (!backward_) return;
  require_as_asked(*backward_, strict_);
  ++backward_->calls;
}

std::vector<Receipt> MoeOnRanks::receipts() const {
  std::vector<Receipt> all{*forward_};
  if (backward_) all.push_back(*backward_);
  return all;
}

}  // namespace tandem
