// Steps of Engine that are launched before the tokens of the step before are known. Their rows take
// these tokens on the device (feed_tokens), so a GPU goes from one step to the next while the host
// handles the tokens of the step before. Pages of a text that has ended may be given to others at
// once: their rows are computed after all launched ones.
#include <algorithm>

#include "engine/infer/engine.h"

namespace tandem {

bool Engine::may_run_ahead(const Step& step) const {
  if (!runs_ahead_ || !step.scored.empty() || !step.rows.read.empty()) return false;
  int64_t missing = 0, rows = 0;
  for (const auto& sequence : running_) {
    if (sequence->left() > 0) return false;  // a prompt, or a text without a row in `step`
    if (!sequence->continues(capacity())) {
      if (sequence->request.rolls) return false;
      continue;
    }
    missing +=
        std::max<int64_t>(0, pages_of(sequence->cached + 1) - int64_t(sequence->pages.size()));
    ++rows;
  }
  // A request that waits begins with the next step that is planned.
  if (!waiting_.empty() && rows < max_sequences_) return false;
  return rows > 0 && missing <= free_pages();
}

void Engine::plan_ahead(const Step& step) {
  planned_ = {};
  return_pages_before_windows();
  for (size_t i = 0; i < step.chosen.size(); ++i) {
    Sequence* const sequence = step.chosen[i];
    if (sequence == nullptr || !sequence->continues(capacity())) continue;
    take_pages(*sequence, sequence->cached + 1);
    add_unknown_row(*sequence, int32_t(i));
  }
  was_of_tokens_ = true;
}

void Engine::remove_from_launched(const Sequence& sequence) {
  if (launched_) std::ranges::replace(launched_->chosen, &sequence, nullptr);
}

void Engine::drop_unread_step() {
  if (!launched_) return;
  const auto is_read = [](const Sequence* sequence) { return sequence != nullptr; };
  if (std::ranges::any_of(launched_->chosen, is_read)) return;
  decoder_.collect();
  launched_.reset();
}

}  // namespace tandem
