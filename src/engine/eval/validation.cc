#include "engine/eval/validation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "comm/exec.h"
#include "engine/config/device_traits.h"
#include "engine/data/text/documents.h"
#include "engine/data/text/text_windows.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Whether there is a target: with `document_mask` one within a document.
bool has_targets(const HeldOut& set, bool document_mask) {
  if (!set.stream) return !set.files.empty();
  const int64_t tokens = set.stream->tokens();
  if (!document_mask || tokens < 2) return tokens > 1;
  return tokens - 1 > count_ignored_targets(*set.stream, 1, tokens);
}

const HeldOut& checked(const TokenSource& source, const DataConfig& data) {
  const HeldOut& set = source.held_out();
  if (has_targets(set, data.document_mask)) return set;
  if (!data.val_paths.empty()) {
    throw ConfigError(
        fmt::format("train.validate_every: data.val_paths {} have no targets: expected {}",
                    fmt::join(data.val_paths, ", "),
                    data.document_mask ? "documents of two tokens or more" : "two tokens"));
  }
  throw ConfigError(fmt::format(
      "train.validate_every: data.val_fraction holds nothing out of {}: expected a larger share",
      source.describe()));
}

std::unique_ptr<const ScoredWindows> make_windows(const HeldOut& set, int64_t seq, int64_t stride,
                                                  int64_t max, bool document_mask) {
  if (set.stream && !set.stream->scored_spans().empty()) {
    return std::make_unique<PackedWindows>(set.stream, seq, max);
  }
  if (set.stream) {
    return std::make_unique<StreamWindows>(set.stream, seq, stride, max, document_mask);
  }
  return std::make_unique<TextWindows>(set.files, set.sizes, seq, stride, max, set.contents);
}

/// Positions that a validation scores, about; 0: all.
int64_t max_positions(const RunConfig& train) {
  return train.validate_steps > 0 ? train.validate_steps * train.batch * train.seq
                                  : train.validate_bytes;
}

/// Same as in `tandem eval`, but GPU ranks have experts in bf16 only.
DType choose_dtype(Communicator& tp, const ModelConfig& config) {
  return config.experts > 0 ? device_traits(make_exec(tp)).validated_experts : DType::f32;
}

/// A learner scores its share with weights of its own. Context-parallel ranks score whole windows.
constexpr Axes kScorers{Axis::cp, Axis::ep, Axis::expert_dp, Axis::pp, Axis::sync};

/// Sums of one rank after a batch.
struct BatchSums {
  int64_t bytes = 0;
  double nats = 0;
  bool stop = false, failed = false;
};

}  // namespace

Validation::Validation(const ParallelGroups& groups, const ModelConfig& model,
                       const DataConfig& data, const RunConfig& train, const TokenSource& source)
    : groups_(groups),
      num_scorers_(groups.dims().size(kScorers)),
      scorer_(groups.dims().index(kScorers, groups.world().rank())),
      evaluator_(groups.tp(), model,
                 {.dtype = choose_dtype(groups.tp(), model), .experts = groups.experts()}),
      is_text_(!checked(source, data).stream),
      limit_(train.validate_steps > 0 ? "train.validate_steps" : "train.validate_bytes"),
      windows_(make_windows(source.held_out(), evaluator_.options().seq,
                            evaluator_.options().stride, max_positions(train),
                            data.document_mask)) {
  groups.world().require_same("the held-out text", source.held_out().identity);
}

std::string Validation::describe() const {
  return fmt::format("validation on {} of {} windows of {} tokens of the held-out {} ({})",
                     windows_->count(), windows_->all(), evaluator_.options().seq,
                     is_text_ ? "text" : "tokens", limit_);
}

/// Assigns the batches of a round to the scorers in order.
std::vector<ScoredWindow> Validation::read(int64_t round) {
  const int64_t batch = evaluator_.options().batch;
  const int64_t begin = (round * num_scorers_ + scorer_) * batch;
  const int64_t end = std::min(windows_->count(), begin + batch);
  std::vector<ScoredWindow> windows;
  try {
    for (int64_t i = begin; i < end; ++i) windows.push_back(windows_->read(i));
  } catch (const IoError& error) {
    error_ = error.what();
  }
  return windows;
}

std::string Validation::first_error() {
  std::string first;
  for (const auto& blob :
       groups_.world().exchange(std::as_bytes(std::span(error_)), "validation")) {
    if (first.empty()) first.assign(reinterpret_cast<const char*>(blob.data()), blob.size());
  }
  return first;
}

std::optional<double> Validation::loss(int64_t step,
                                       const std::function<void(Transformer& model)>& load,
                                       const std::atomic<bool>* stop, ProgressLine* progress) {
  load(evaluator_.model());
  evaluator_.model().parameters_changed();
  FileScore total;
  error_.clear();
  const auto without = [&](const std::string& reason) -> std::optional<double> {
    if (progress) {
      progress->note(fmt::format("warning: step {}: no validation loss: {}", step, reason));
    }
    return {};
  };
  const int64_t of_round = num_scorers_ * evaluator_.options().batch;
  for (int64_t round = 0; round * of_round < windows_->count(); ++round) {
    const FileScore scored = evaluator_.score(read(round));
    BatchSums local{0, 0, stop && *stop, !error_.empty()};
    if (groups_.tp().rank() == 0) local.bytes = scored.bytes, local.nats = scored.nats;
    BatchSums all;
    double nats = total.nats;
    for (const auto& blob :
         groups_.world().exchange(std::as_bytes(std::span(&local, 1)), "validation")) {
      BatchSums sums;
      std::memcpy(&sums, blob.data(), sizeof sums);
      all.stop = all.stop || sums.stop;
      all.failed = all.failed || sums.failed;
      all.bytes += sums.bytes;
      nats += sums.nats;  // in the order of the batches, whatever the layout
    }
    if (all.failed) return without(first_error());
    if (all.stop) return without("the run is to end");
    total.bytes += all.bytes;
    total.nats = nats;
    if (progress) {
      progress->meanwhile(fmt::format("step {}: validation, window {} of {}", step,
                                      std::min(windows_->count(), (round + 1) * of_round),
                                      windows_->count()));
    }
  }
  if (total.bytes == 0) return without("its windows have no targets");
  if (progress) {
    progress->note(fmt::format("step {}: validation loss {:.4f} nats per {}, {:.4f} bits", step,
                               total.nats / double(total.bytes), is_text_ ? "byte" : "token",
                               total.bits_per_byte()));
  }
  return total.nats / double(total.bytes);
}

}  // namespace tandem
