// The loss on held-out text while a run goes on, as `tandem eval` computes it: a model of its own,
// in f32, that gets the parameters as they are. Nothing that training reads is written.
//
// Every replica scores an equal part of the windows, and all ranks meet after each batch of them.
// So no wait is longer than a batch, whatever the files are like, and a rank that cannot read its
// part, or is asked to stop, ends the validation on all of them, not the training.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "engine/data/corpus.h"
#include "engine/eval/evaluate.h"
#include "engine/model/transformer.h"
#include "engine/report/progress.h"
#include "tandem/communicator.h"

namespace tandem {

class Validation {
 public:
  /// Collective over `world`, of which `tp` and `dp` are parts, and, where replicas share experts,
  /// `experts` (else nullptr), which outlive this. At most about `max_bytes` are scored, spread
  /// over all held-out text (0: all of it). Throws ConfigError when no file is held out.
  Validation(Communicator& world, Communicator& tp, Communicator& dp, Communicator* experts,
             const ModelConfig& config, const Corpus& corpus, int64_t max_bytes);

  /// "validation on 256 of 1024 windows of 128 tokens of the held-out text (train.validate_bytes)"
  std::string describe() const;
  /// Collective: nats per byte, the same on every rank; none, and a note says why, when a rank
  /// cannot read its part or once `*stop` is set on one. `progress`: of rank 0, else nullptr.
  std::optional<double> loss(int64_t step, std::span<const float> parameters,
                             const std::atomic<bool>* stop, ProgressLine* progress);

 private:
  std::vector<TextWindow> read(int64_t round);
  std::string first_error();  ///< collective

  Communicator &world_, &tp_, &dp_;
  Evaluator evaluator_;
  TextWindows windows_;
  std::string error_;  // of this rank
};

}  // namespace tandem
