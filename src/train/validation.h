// The loss on held-out text while a run goes on, as `tandem eval` computes it: a model of its own,
// in f32, that gets the parameters as they are. Nothing that training reads is written.
#pragma once

#include <string>
#include <vector>

#include "model/transformer.h"
#include "tandem/communicator.h"
#include "train/corpus.h"
#include "train/evaluate.h"

namespace tandem {

class Validation {
 public:
  /// Collective over `tp`, `dp` and, where replicas share experts, `experts` (else nullptr), which
  /// outlive this. Throws ConfigError when no file is held out.
  Validation(Communicator& tp, Communicator& dp, Communicator* experts, const ModelConfig& config,
             const Corpus& corpus);

  /// Collective: the replicas share the files; those that share experts score the same ones. The
  /// same on every rank.
  FileScore score(std::span<const float> parameters);

 private:
  Communicator& dp_;
  int ep_;  ///< replicas that share experts
  Evaluator evaluator_;
  std::vector<std::string> files_;  // of this replica
};

}  // namespace tandem
