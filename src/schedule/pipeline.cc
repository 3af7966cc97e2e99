#include "schedule/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

#include "tandem/error.h"

namespace tandem::schedule {
namespace {

constexpr std::array<std::pair<PipelineKind, std::string_view>, 6> kNames{{
    {PipelineKind::gpipe, "gpipe"},
    {PipelineKind::one_f_one_b, "1f1b"},
    {PipelineKind::interleaved, "interleaved"},
    {PipelineKind::zb_h1, "zb-h1"},
    {PipelineKind::zb_v, "zb-v"},
    {PipelineKind::dualpipe_v, "dualpipe-v"},
}};

bool has_v_shape(PipelineKind kind) {
  return kind == PipelineKind::zb_v || kind == PipelineKind::dualpipe_v;
}

/// `ahead` forward passes, then backward and forward passes in turn.
std::vector<PipelineAction> alternate(int microbatches, int ahead) {
  std::vector<PipelineAction> actions;
  int forward = 0;
  for (int backward = 0; backward < microbatches; ++backward) {
    while (forward < std::min(microbatches, backward + ahead)) {
      actions.push_back({PassKind::forward, 0, forward++});
    }
    actions.push_back({PassKind::backward, 0, backward});
  }
  return actions;
}

/// Forward passes of a rank before its first backward pass, except for the one directly before it.
int interleaved_warmup(const PipelineShape& shape, int rank) {
  return std::min(shape.microbatches * shape.chunks,
                  2 * (shape.ranks - rank - 1) + (shape.chunks - 1) * shape.ranks);
}

/// Rounds of `ranks` microbatches: a round traverses all chunks before the next round.
std::vector<PipelineAction> interleave(const PipelineShape& shape, int rank) {
  const int passes = shape.microbatches * shape.chunks, round = shape.ranks * shape.chunks;
  const int warmup = interleaved_warmup(shape, rank);
  const auto action_at = [&](PassKind pass, int index) {
    const int chunk = index % round / shape.ranks;
    return PipelineAction{pass, pass == PassKind::forward ? chunk : shape.chunks - 1 - chunk,
                          index / round * shape.ranks + index % shape.ranks};
  };
  std::vector<PipelineAction> actions;
  for (int i = 0; i < passes + warmup; ++i) {
    if (i < passes) actions.push_back(action_at(PassKind::forward, i));
    if (i >= warmup) actions.push_back(action_at(PassKind::backward, i - warmup));
  }
  return actions;
}

/// 1F1B; weight gradients lag `rank` microbatches, so that each rank stores as many activations.
std::vector<PipelineAction> defer_weights(const PipelineShape& shape, int rank) {
  std::vector<PipelineAction> actions;
  int weight = 0;
  for (PipelineAction action : alternate(shape.microbatches, shape.ranks - rank)) {
    const bool is_backward = action.pass == PassKind::backward;
    if (is_backward) action.pass = PassKind::backward_input;
    actions.push_back(action);
    if (is_backward && action.microbatch >= rank) {
      actions.push_back({PassKind::backward_weight, 0, weight++});
    }
  }
  while (weight < shape.microbatches) actions.push_back({PassKind::backward_weight, 0, weight++});
  return actions;
}

/// Appends the passes of a V-shaped schedule. Each kind of pass takes a chunk's microbatches in
/// order; passes of microbatches that do not exist are left out.
class TwoChunks {
 public:
  explicit TwoChunks(int microbatches) : microbatches_(microbatches) {}

  void forward(int chunk) { add(PassKind::forward, chunk, forward_[size_t(chunk)]++); }
  void backward(int chunk) { add(PassKind::backward, chunk, backward_[size_t(chunk)]++); }
  /// The weight gradients follow by `weight`.
  void backward_input(int chunk) {
    const int microbatch = backward_[size_t(chunk)]++;
    add(PassKind::backward_input, chunk, microbatch);
    deferred_.emplace_back(chunk, microbatch);
  }
  /// First deferred weight gradients.
  void weight() {
    const auto [chunk, microbatch] = deferred_.front();
    deferred_.pop_front();
    add(PassKind::backward_weight, chunk, microbatch);
  }
  int deferred() const { return int(deferred_.size()); }
  std::vector<PipelineAction> take() { return std::move(actions_); }

 private:
  void add(PassKind pass, int chunk, int microbatch) {
    if (microbatch < microbatches_) actions_.push_back({pass, chunk, microbatch});
  }

  int microbatches_;
  std::array<int, 2> forward_{}, backward_{};
  std::deque<std::pair<int, int>> deferred_;  ///< chunk and microbatch
  std::vector<PipelineAction> actions_;
};

/// Without gaps if all three passes take equally long. Fewer microbatches than fill the pipeline
/// take those positions that they have among 2p-1.
std::vector<PipelineAction> zero_bubble_v(const PipelineShape& shape, int rank) {
  const int after = shape.ranks - rank;  // ranks from this one on
  const int rounds = std::max(shape.microbatches, 2 * shape.ranks - 1);
  TwoChunks chunks(shape.microbatches);
  const auto backward_now = [&](int chunk) {
    chunks.backward_input(chunk);
    chunks.weight();
  };
  for (int i = 0; i < 2 * after - 1; ++i) chunks.forward(0);
  for (int i = 0; i < rank; ++i) {
    chunks.forward(1);
    chunks.forward(0);
  }
  for (int i = 0; i < after; ++i) {
    chunks.forward(1);
    backward_now(1);
  }
  for (int i = 0; i < rounds - shape.ranks; ++i) {
    if (i < rounds - (2 * after - 1) - rank) chunks.forward(0);
    backward_now(0);
    chunks.forward(1);
    backward_now(1);
  }
  for (int i = 0; i < rank; ++i) {
    chunks.backward_input(0);
    chunks.backward_input(1);
  }
  for (int i = 0; i < after; ++i) {
    chunks.backward_input(0);
    chunks.weight();
  }
  while (chunks.deferred() > 0) chunks.weight();
  return chunks.take();
}

std::vector<PipelineAction> dualpipe_v(const PipelineShape& shape, int rank) {
  const int before = rank + 1, after = shape.ranks - rank - 1;  // `before` includes this rank
  TwoChunks chunks(shape.microbatches);
  for (int i = 0; i < 2 * after; ++i) chunks.forward(0);
  for (int i = 0; i < before; ++i) {
    chunks.forward(0);
    chunks.forward(1);
  }
  for (int i = 0; i < after; ++i) {
    chunks.backward_input(1);
    chunks.weight();
    chunks.forward(1);
  }
  for (int i = 0; i < shape.microbatches - 2 * shape.ranks + before; ++i) {
    chunks.forward(0);
    chunks.backward(1);
    chunks.forward(1);
    chunks.backward(0);
  }
  for (int i = 0; i < after; ++i) {
    chunks.backward(1);
    chunks.forward(1);
    chunks.backward(0);
  }
  // The later half of these backward passes defers its weight gradients.
  for (int i = 0; i < 2 * before; ++i) {
    i < before ? chunks.backward(1 - i % 2) : chunks.backward_input(1 - i % 2);
  }
  for (int i = 0; i < after; ++i) {
    chunks.weight();
    chunks.backward_input(0);
  }
  while (chunks.deferred() > 0) chunks.weight();
  return chunks.take();
}

}  // namespace

std::string_view name_of(PipelineKind kind) {
  for (const auto& [value, name] : kNames) {
    if (value == kind) return name;
  }
  return "";
}

PipelineKind parse_pipeline_kind(const std::string& name) {
  std::string known;
  for (const auto& [value, known_name] : kNames) {
    if (name == known_name) return value;
    known += fmt::format("{}\"{}\"", known.empty() ? "" : ", ", known_name);
  }
  throw ConfigError(fmt::format("schedule \"{}\": expected one of {}", name, known));
}

std::vector<PipelineKind> pipeline_kinds() {
  std::vector<PipelineKind> kinds;
  for (const auto& [kind, name] : kNames) kinds.push_back(kind);
  return kinds;
}

int min_chunks(PipelineKind kind) {
  return kind == PipelineKind::interleaved || has_v_shape(kind) ? 2 : 1;
}

void check_pipeline(const PipelineShape& shape) {
  if (shape.ranks < 1 || shape.microbatches < 1 || shape.chunks < 1) {
    throw ConfigError(
        fmt::format("pipeline of {} ranks with {} stages each and {} microbatches: expected sizes "
                    "of at least 1",
                    shape.ranks, shape.chunks, shape.microbatches));
  }
  const int chunks = min_chunks(shape.kind);
  const bool any_more = shape.kind == PipelineKind::interleaved;
  if (any_more ? shape.chunks < chunks : shape.chunks != chunks) {
    throw ConfigError(fmt::format("schedule \"{}\" with {} stages per rank: expected {}{}",
                                  name_of(shape.kind), shape.chunks, any_more ? "at least " : "",
                                  chunks));
  }
  if (shape.kind == PipelineKind::interleaved && shape.microbatches % shape.ranks != 0) {
    throw ConfigError(
        fmt::format("schedule \"interleaved\" with {} microbatches: expected a multiple of its {} "
                    "ranks",
                    shape.microbatches, shape.ranks));
  }
  if (shape.kind == PipelineKind::dualpipe_v && shape.microbatches < 2 * shape.ranks) {
    throw ConfigError(
        fmt::format("schedule \"dualpipe-v\" with {} microbatches: expected at least {}, twice its "
                    "ranks",
                    shape.microbatches, 2 * shape.ranks));
  }
}

int stage_of(const PipelineShape& shape, int rank, int chunk) {
  if (has_v_shape(shape.kind) && chunk == 1) return shape.stages() - 1 - rank;
  return chunk * shape.ranks + rank;
}

StagePosition position_of(const PipelineShape& shape, int stage) {
  const int chunk = stage / shape.ranks, rank = stage % shape.ranks;
  return {has_v_shape(shape.kind) && chunk == 1 ? shape.ranks - 1 - rank : rank, chunk};
}

std::vector<PipelineAction> pipeline_actions(const PipelineShape& shape, int rank) {
  check_pipeline(shape);
  switch (shape.kind) {
    case PipelineKind::gpipe:
      return alternate(shape.microbatches, shape.microbatches);
    case PipelineKind::one_f_one_b:
      return alternate(shape.microbatches, shape.ranks - rank);
    case PipelineKind::interleaved:
      return interleave(shape, rank);
    case PipelineKind::zb_h1:
      return defer_weights(shape, rank);
    case PipelineKind::zb_v:
      return zero_bubble_v(shape, rank);
    case PipelineKind::dualpipe_v:
      return dualpipe_v(shape, rank);
  }
  return {};
}

std::vector<std::vector<PipelineAction>> pipeline_actions(const PipelineShape& shape) {
  std::vector<std::vector<PipelineAction>> actions;
  for (int rank = 0; rank < shape.ranks; ++rank) actions.push_back(pipeline_actions(shape, rank));
  return actions;
}

int peak_activations(const PipelineShape& shape, int rank) {
  const int ranks = shape.ranks, microbatches = shape.microbatches;
  switch (shape.kind) {
    case PipelineKind::gpipe:
      return microbatches;
    case PipelineKind::one_f_one_b:
      return std::min(microbatches, ranks - rank);
    case PipelineKind::interleaved:
      return std::min(microbatches * shape.chunks, interleaved_warmup(shape, rank) + 1);
    case PipelineKind::zb_h1:
      return std::min(microbatches, ranks);
    case PipelineKind::zb_v:
      return std::min(microbatches, 2 * ranks - rank - 1) + std::min(microbatches, rank + 1);
    case PipelineKind::dualpipe_v:
      return 2 * ranks + 1;
  }
  return 0;
}

}  // namespace tandem::schedule
