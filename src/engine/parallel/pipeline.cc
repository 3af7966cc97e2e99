#include "engine/parallel/pipeline.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/exec.h"
#include "core/system/process/clock.h"
#include "engine/parallel/dims.h"
#include "observe/recorder.h"
#include "tandem/collectives.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

schedule::PipelineShape make_shape(const ParallelConfig& parallel, int64_t microbatches) {
  schedule::PipelineShape shape{.microbatches = int(microbatches)};
  if (parallel.pp == 1) return shape;
  shape.kind = schedule::parse_pipeline_kind(parallel.schedule);
  shape.ranks = int(parallel.pp);
  shape.chunks = int(parallel.virtual_stages);
  return shape;
}

}  // namespace

schedule::PipelineShape pipeline_shape(const ParallelConfig& parallel, const RunConfig& train) {
  const int64_t share = ParallelDims(parallel).local_batch(train.batch);
  return make_shape(parallel, share / microbatch_size(parallel, train));
}

std::vector<StageLayers> pipeline_layers(const ParallelConfig& parallel, int64_t num_layers) {
  const int64_t stages = parallel.pp * parallel.virtual_stages;
  const auto& given = parallel.layers_per_stage;
  std::vector<StageLayers> layers;
  int64_t first = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    const int64_t count =
        given.empty() ? shard_of(num_layers, int(stages), int(stage)).count : given[size_t(stage)];
    layers.push_back({first, count, stage == 0, stage + 1 == stages});
    first += count;
  }
  const schedule::PipelineShape shape = make_shape(parallel, 1);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      layers[size_t(stage_of(shape, rank, chunk))].pp_rank = rank;
    }
  }
  return layers;
}

Pipeline::Pipeline(Communicator* pp, const schedule::PipelineShape& shape,
                   std::vector<std::unique_ptr<PipelineStage>> stages, bool forward_runs,
                   const Wire& wire)
    : pp_(pp),
      shape_(shape),
      rank_(pp ? pp->rank() : 0),
      stages_(std::move(stages)),
      slots_(stages_.size()) {
  for (size_t i = 0; i < stages_.size(); ++i) {
    stages_[i]->add_slot();
    slots_[i].emplace_back();
  }
  bool is_tied = false;
  for (const auto& stage : stages_) is_tied |= stage->tied_stage() != nullptr;
  if (pp) {
    const char local = is_tied;
    for (const auto& blob : pp->exchange(std::as_bytes(std::span(&local, 1)), "tied embedding")) {
      is_tied |= blob[0] != std::byte{0};
    }
    has_tied_ = is_tied;
    make_links(forward_runs, wire);
  }
  passes_ = passes_of(rank_);
  for (size_t chunk = 0; chunk < stages_.size(); ++chunk) mark_final(int(chunk));
}

/// Marks the chunk's passes after which gradients have those of all microbatches.
void Pipeline::mark_final(int chunk) {
  for (const bool is_embedding : {false, true}) {
    const auto last = std::find_if(passes_.rbegin(), passes_.rend(), [&](const Pass& pass) {
      return pass.chunk == chunk && pass.kind != Pass::Kind::forward &&
             pass.kind != Pass::Kind::backward_input &&
             (pass.kind == Pass::Kind::embedding) == is_embedding;
    });
    if (last != passes_.rend()) last->is_final = true;
  }
}

/// Passes of a rank, with the additions of the lookups' gradients. They follow the forward pass
/// whose input the first stage made after sending them, so no rank waits for them in addition.
std::vector<Pipeline::Pass> Pipeline::passes_of(int rank) const {
  using schedule::PassKind;
  const auto kind_of = [](PassKind pass) {
    switch (pass) {
      case PassKind::forward:
        return Pass::Kind::forward;
      case PassKind::backward:
        return Pass::Kind::backward;
      case PassKind::backward_input:
        return Pass::Kind::backward_input;
      case PassKind::backward_weight:
        break;
    }
    return Pass::Kind::backward_weight;
  };
  const schedule::StagePosition last = schedule::position_of(shape_, shape_.stages() - 1);
  const bool adds_lookups = has_tied_ && rank == last.rank;
  const schedule::StagePosition first = schedule::position_of(shape_, 0);
  std::vector<schedule::PipelineAction> of_first;
  if (adds_lookups) of_first = schedule::pipeline_actions(shape_, first.rank);
  size_t at = 0;  // in of_first
  std::vector<Pass> passes;
  const auto add_lookups_before = [&](int microbatch) {
    for (; at < of_first.size(); ++at) {
      const schedule::PipelineAction& action = of_first[at];
      if (action.chunk != first.chunk) continue;
      if (action.pass == PassKind::forward && action.microbatch == microbatch) return;
      if (action.pass == PassKind::backward || action.pass == PassKind::backward_input) {
        passes.push_back({Pass::Kind::embedding, last.chunk, action.microbatch});
      }
    }
  };
  for (const schedule::PipelineAction& action : schedule::pipeline_actions(shape_, rank)) {
    passes.push_back({kind_of(action.pass), action.chunk, action.microbatch});
    if (adds_lookups && action.chunk == last.chunk && action.pass == PassKind::forward) {
      add_lookups_before(action.microbatch);
    }
  }
  if (adds_lookups) add_lookups_before(-1);
  return passes;
}

/// Bound of the messages that are sent and not received yet. `before(pass)`: the destination's
/// pass that the source's waits for, if any.
template <typename IsSend, typename IsReceive, typename Before>
int Pipeline::max_waiting(int source, const IsSend& is_send, int destination,
                          const IsReceive& is_receive, const Before& before) const {
  const std::vector<Pass> receiver = passes_of(destination);
  size_t at = 0;
  int waiting = 0, max_waiting = 1;
  for (const Pass& pass : passes_of(source)) {
    const auto awaited = std::ranges::find_if(receiver, before(pass));
    if (awaited != receiver.end()) {
      for (const auto end = size_t(awaited - receiver.begin()) + 1; at < end; ++at) {
        waiting -= is_receive(receiver[at]);
      }
    }
    waiting += is_send(pass);
    max_waiting = std::max(max_waiting, waiting);
  }
  return max_waiting;
}

void Pipeline::make_links(bool forward_runs, const Wire& wire) {
  using Kind = Pass::Kind;
  const auto is_forward = [](int chunk) {
    return [=](const Pass& p) { return p.kind == Kind::forward && p.chunk == chunk; };
  };
  const auto is_backward = [](int chunk) {
    return [=](const Pass& p) {
      return (p.kind == Kind::backward || p.kind == Kind::backward_input) && p.chunk == chunk;
    };
  };
  // The pass of a microbatch at the destination, for one of the source.
  const auto same = [](auto of_source, auto of_destination) {
    return [=](const Pass& pass) {
      return [=](const Pass& other) {
        return of_source(pass) && of_destination(other) && other.microbatch == pass.microbatch;
      };
    };
  };
  std::vector<StageLinks::Channel> channels;
  for (int s = 0; s + 1 < shape_.stages(); ++s) {
    const auto [rank, chunk] = schedule::position_of(shape_, s);
    const auto [next_rank, next_chunk] = schedule::position_of(shape_, s + 1);
    const int forward = max_waiting(rank, is_forward(chunk), next_rank, is_backward(next_chunk),
                                    same(is_backward(chunk), is_backward(next_chunk)));
    channels.push_back({rank, next_rank, forward, "pp_activations", forward_runs});
    const int backward = max_waiting(next_rank, is_backward(next_chunk), rank, is_backward(chunk),
                                     same(is_forward(next_chunk), is_forward(chunk)));
    channels.push_back({next_rank, rank, backward, "pp_gradients"});
  }
  if (has_tied_) {
    const auto [first, first_chunk] = schedule::position_of(shape_, 0);
    const auto [last, last_chunk] = schedule::position_of(shape_, shape_.stages() - 1);
    const int slots = max_waiting(
        first, is_backward(first_chunk), last,
        [](const Pass& pass) { return pass.kind == Kind::embedding; },
        same(is_backward(first_chunk), is_backward(last_chunk)));
    channels.push_back({first, last, slots, "pp_lookups"});
  }
  links_.emplace(*pp_, stages_.front()->exec(), std::move(channels), stages_.front()->message(),
                 wire);
}

int Pipeline::take_slot(const Pass& pass) {
  std::vector<Slot>& slots = slots_[size_t(pass.chunk)];
  auto free = std::ranges::find(slots, -1, &Slot::microbatch);
  if (free == slots.end()) {
    stages_[size_t(pass.chunk)]->add_slot();
    free = slots.insert(slots.end(), Slot{});
  }
  free->microbatch = pass.microbatch;
  free->uses = 1 + (has_tied_ && is_last(stage(pass.chunk)));
  return int(free - slots.begin());
}

int Pipeline::find_slot(const Pass& pass) const {
  const std::vector<Slot>& slots = slots_[size_t(pass.chunk)];
  return int(std::ranges::find(slots, pass.microbatch, &Slot::microbatch) - slots.begin());
}

/// After a last pass of its kind.
void Pipeline::release(const Pass& pass) {
  Slot& slot = slots_[size_t(pass.chunk)][size_t(find_slot(pass))];
  if (--slot.uses == 0) slot.microbatch = -1;
}

void Pipeline::forward(const Pass& pass, const Batch& batch) {
  PipelineStage& model = *stages_[size_t(pass.chunk)];
  const int stage = this->stage(pass.chunk);
  const uint64_t number = forward_begin_ + uint64_t(pass.microbatch);
  const int slot = take_slot(pass);
  const bool has_documents = !batch.document_starts.empty();
  const bool reads = stage == 0 || is_last(stage) || has_documents || batch.has_padding;
  if (reads) batch.read(pass.microbatch);
  if (has_documents) model.set_documents(batch.document_starts, slot);
  if (stage > 0) model.set_input(slot, links_->receive(activations(stage - 1), number));
  model.enqueue_forward(reads ? batch.tokens : std::span<const int32_t>(), batch.targets, slot);
  if (!is_last(stage)) links_->send(activations(stage), number, model.output(slot));
}

void Pipeline::backward(const Pass& pass, float scale, const FlatRangeCallback& ready) {
  PipelineStage& model = *stages_[size_t(pass.chunk)];
  const int stage = this->stage(pass.chunk);
  const uint64_t number = backward_begin_ + uint64_t(pass.microbatch);
  const int slot = find_slot(pass);
  if (!is_last(stage)) {
    model.set_residual_gradient(links_->receive(gradients(stage), number));
  }
  if (pass.kind == Pass::Kind::backward) {
    model.backward(slot, scale, ready);
    release(pass);
  } else {
    model.backward_input(slot, scale);
  }
  const Tensor dx = model.residual_gradient();
  if (stage > 0) {
    // First: the gradient's arrival then tells that the input's slot is free.
    links_->acknowledge(activations(stage - 1), forward_begin_ + uint64_t(pass.microbatch));
    links_->send(gradients(stage - 1), number, dx);
  }
  if (stage == 0 && has_tied_) links_->send(lookups(), number, dx);
  if (!is_last(stage)) links_->acknowledge(gradients(stage), number);
}

void Pipeline::backward_embedding(const Pass& pass, const FlatRangeCallback& ready) {
  PipelineStage& model = *stages_[size_t(pass.chunk)];
  const uint64_t number = backward_begin_ + uint64_t(pass.microbatch);
  model.backward_embedding(find_slot(pass), links_->receive(lookups(), number), ready);
  links_->acknowledge(lookups(), number);
  release(pass);
}

Phase Pipeline::phase_of(Pass::Kind kind) {
  if (kind == Pass::Kind::forward) return Phase::forward;
  return kind == Pass::Kind::backward_weight ? Phase::weight_gradients : Phase::backward;
}

/// Name of a pass in a trace.
const char* Pipeline::name_of(Pass::Kind kind) {
  switch (kind) {
    case Pass::Kind::forward:
      return "forward";
    case Pass::Kind::backward:
      return "backward";
    case Pass::Kind::backward_input:
      return "backward_input";
    case Pass::Kind::backward_weight:
      return "backward_weight";
    case Pass::Kind::embedding:
      return "backward_embedding";
  }
  return "?";
}

void Pipeline::run(const Batch& batch, float scale, const ReadyCallback& ready) {
  const auto begin = Clock::now();
  const double waited_before = links_ ? links_->waited_s() : 0;
  for (const Pass& pass : passes_) {
    const auto report = [&](FlatRange range) { ready(pass.chunk, range, pass.is_final); };
    const ScopedPhase phase(phase_of(pass.kind));
    const ScopedPass span(name_of(pass.kind), pass.microbatch, stage(pass.chunk));
    switch (pass.kind) {
      case Pass::Kind::forward:
        forward(pass, batch);
        break;
      case Pass::Kind::backward:
      case Pass::Kind::backward_input:
        backward(pass, scale, report);
        break;
      case Pass::Kind::backward_weight:
        stages_[size_t(pass.chunk)]->backward_weight(find_slot(pass), report);
        release(pass);
        break;
      case Pass::Kind::embedding:
        backward_embedding(pass, report);
        break;
    }
  }
  forward_begin_ += uint64_t(shape_.microbatches);
  backward_begin_ += uint64_t(shape_.microbatches);
  times_ = {};
  if (!links_) return;
  if (links_->times_waits()) {
    times_ = {seconds_since(begin), links_->waited_s() - waited_before};
  }
  times_.sent_bytes = links_->sent_bytes() - sent_bytes_;
  sent_bytes_ = links_->sent_bytes();
  links_->end_run();
}

void Pipeline::run_forward(const Batch& batch) {
  for (const Pass& pass : passes_) {
    if (pass.kind != Pass::Kind::forward) continue;
    const ScopedPhase phase(Phase::forward);
    const int stage = this->stage(pass.chunk);
    const ScopedPass span("forward_only", pass.microbatch, stage);
    forward(pass, batch);
    if (stage > 0) {
      links_->acknowledge(activations(stage - 1), forward_begin_ + uint64_t(pass.microbatch));
    }
    for (Slot& slot : slots_[size_t(pass.chunk)]) slot.microbatch = -1;
  }
  forward_begin_ += uint64_t(shape_.microbatches);
}

double Pipeline::take_loss() {
  double loss = 0;
  for (const auto& stage : stages_) loss += stage->take_loss();
  return loss;
}

size_t Pipeline::activation_bytes() const {
  size_t bytes = 0;
  for (const auto& stage : stages_) bytes += stage->activation_bytes();
  return bytes;
}

void Pipeline::share_embedding() {
  if (!has_tied_) return;
  const ScopedPhase phase(Phase::pp_wait);
  const schedule::StagePosition first = schedule::position_of(shape_, 0);
  const schedule::StagePosition last = schedule::position_of(shape_, shape_.stages() - 1);
  const auto values = [&](int chunk) { return stages_[size_t(chunk)]->tied_stage()->embedding(); };
  if (first.rank == last.rank && rank_ == first.rank) {
    copy(stages_.front()->exec(), values(last.chunk), values(first.chunk));
  } else if (rank_ == last.rank) {
    send(*pp_, values(last.chunk), first.rank);
  } else if (rank_ == first.rank) {
    recv(*pp_, values(first.chunk), last.rank);
  }
}

}  // namespace tandem
