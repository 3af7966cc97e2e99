#include "engine/model/recompute.h"

#include <fmt/format.h>

#include "engine/model/branch.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {

Recompute parse_recompute(const std::string& name) {
  if (name == "none") return Recompute::none;
  if (name == "selective") return Recompute::selective;
  if (name == "full") return Recompute::full;
  throw ConfigError(
      fmt::format("recompute \"{}\": expected \"none\", \"selective\" or \"full\"", name));
}

void recompute_layer(ModelContext& c, std::vector<Branch>& branches, MicrobatchState& m,
                     int64_t layer) {
  const Recompute mode = c.options.recompute.of(layer);
  if (mode == Recompute::none) return;
  const ScopedSpan span(SpanKind::recompute, "recompute", int(c.layers.first + layer));
  const auto per_layer = size_t(c.layout.branches_per_layer);
  const size_t begin = size_t(layer) * per_layer, end = begin + per_layer;
  if (mode == Recompute::selective) {
    for (size_t i = begin; i < end; ++i) {
      branches[i].recompute_unsaved(m.residuals[i], m.branches[i]);
    }
    return;
  }
  branches[begin].normalize(m.residuals[begin], m.branches[begin]);
  for (size_t i = begin; i + 1 < end; ++i) {
    branches[i].forward(m.residuals[i], m.residuals[i + 1], m.branches[i], nullptr,
                        branches[i + 1].norm(m.branches[i + 1]));
  }
  branches[end - 1].forward(m.residuals[end - 1], {}, m.branches[end - 1], nullptr, {});
}

}  // namespace tandem
