#include "engine/checkpoint/snapshot/snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/world/host_ranks.h"
#include "core/cpu/parallel.h"
#include "core/system/files.h"
#include "gemm/gemm.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Values that are copied and hashed at a time, while they are in the cache.
constexpr size_t kChunk = size_t{64} << 10;
/// Room for numbers of the train state that have more digits than at the run's begin.
constexpr size_t kStateRoom = 1024;

/// Part of a slice: copied and hashed by one thread.
struct Chunk {
  const float* from;
  float* to;
  size_t count;
};

void add_chunks(const Tensor& from, const Tensor& to, std::vector<Chunk>& chunks) {
  const auto count = size_t(to.elements());
  for (size_t at = 0; at < count; at += kChunk) {
    chunks.push_back(
        {from.as<const float>() + at, to.as<float>() + at, std::min(kChunk, count - at)});
  }
}

/// Hash of the chunks' hashes. Copies each to its target before it is hashed, unless that is where
/// it is.
std::string copy_and_hash(std::span<const Chunk> chunks) {
  std::string hashes(chunks.size() * kHashDigits, '0');
  cpu::parallel_ranges(int64_t(chunks.size()), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& chunk = chunks[size_t(i)];
      const std::span from(chunk.from, chunk.count);
      content_hash(std::as_bytes(from)).copy(hashes.data() + size_t(i) * kHashDigits, kHashDigits);
      if (chunk.to != chunk.from) std::memcpy(chunk.to, chunk.from, from.size_bytes());
    }
  });
  return content_hash(hashes);
}

}  // namespace

SnapshotLayout::SnapshotLayout(const TrainedRanks& ranks) {
  const auto add = [this](std::vector<SnapshotSlice>& to, SnapshotSlice slice) {
    slice.at = values;
    values += slice.count;
    to.push_back(slice);
  };
  for (size_t stage = 0; stage < ranks.stages.size(); ++stage) {
    for (const Moment moment : kAllMoments) {
      for (const StateSlice& slice : ranks.stages[stage].optimizer.slices(moment)) {
        add(slices, {stage, moment, slice.begin, 0, size_t(slice.values.elements())});
      }
    }
  }
  for (const Tensor& residual : LiveState(ranks).residuals()) {
    add(residuals, {.count = size_t(residual.elements())});
  }
}

SnapshotShape SnapshotLayout::shape(int generations, size_t state_room) const {
  SnapshotShape shape{generations, state_room, values * sizeof(float)};
  std::string positions;
  for (const auto* all : {&slices, &residuals}) {
    for (const SnapshotSlice& s : *all) {
      positions += fmt::format("{} {} {} {} {}\n", s.stage, int(s.moment), s.begin, s.at, s.count);
    }
  }
  content_hash(positions).copy(shape.slices, kHashDigits);
  return shape;
}

bool SnapshotLayout::fits(const SnapshotShape& found) const {
  return found == shape(found.generations, found.state_room);
}

SnapshotGeneration::SnapshotGeneration(const Exec& exec, const SnapshotLayout& layout,
                                       const SnapshotArea& area, int index)
    : layout_(layout),
      header_(&area.header(index)),
      state_room_(area.shape().state_room),
      values_(reinterpret_cast<float*>(area.generation(index) + area.shape().values_at())),
      download_(exec, values_, area.shape().generation_bytes() - area.shape().values_at()) {}

std::span<char> SnapshotGeneration::state_text() const {
  return {reinterpret_cast<char*>(header_ + 1), state_room_};
}

Tensor SnapshotGeneration::values(const SnapshotSlice& slice) const {
  return Tensor::of(values_ + slice.at, {int64_t(slice.count)});
}

void SnapshotGeneration::await_complete() const {
  if (completed_.valid()) completed_.get();
}

void SnapshotGeneration::await_complete_checked() const {
  if (completed_.valid()) download_.wait();
  await_complete();
}

void SnapshotGeneration::take(const TrainedRanks& ranks, const TrainState& state, uint64_t start) {
  await_complete_checked();
  const std::string text = to_text(state);
  if (text.size() > state_room_) {
    throw InvalidArgument(fmt::format("snapshot: {} bytes of train state: expected at most {}",
                                      text.size(), state_room_));
  }
  header_->invalidate();

  download_.begin(ranks.stages.front().model.exec());
  std::vector<Chunk> chunks;
  size_t index = 0;
  const auto require_count = [&](const SnapshotSlice& slice, size_t count) {
    if (slice.count == count) return;
    throw InvalidArgument(
        fmt::format("snapshot: slice {} has {} values: expected {}", index, count, slice.count));
  };
  for (size_t stage = 0; stage < ranks.stages.size(); ++stage) {
    const auto& [model, optimizer] = ranks.stages[stage];
    for (const Moment moment : kAllMoments) {
      for (const StateSlice& slice : optimizer.slices(moment)) {
        const Tensor to = values(layout_.slices.at(index));
        require_count(layout_.slices[index++], size_t(slice.values.elements()));
        add_chunks(download_.fetch(model.exec(), slice.values, to), to, chunks);
      }
    }
  }
  download_.end();
  index = 0;
  for (const Tensor& residual : LiveState(ranks).residuals()) {
    require_count(layout_.residuals.at(index), size_t(residual.elements()));
    const Tensor to = values(layout_.residuals[index++]);
    if (download_.is_enqueued()) copy({}, residual, to);
    add_chunks(download_.is_enqueued() ? to : residual, to, chunks);
  }
  if (!download_.is_enqueued()) return complete(state.step, start, text, copy_and_hash(chunks));
  completed_ = std::async(std::launch::async | std::launch::deferred,
                          [this, &world = ranks.world, step = state.step, start, text,
                           chunks = std::move(chunks), threads = kernel_threads()] {
                            const KernelThreads of_hashes(threads);
                            download_.wait_unchecked();
                            if (has_abandoned_gpu_work(world)) return;  // may be of no step
                            complete(step, start, text, copy_and_hash(chunks));
                          });
}

void SnapshotGeneration::before_update(const TrainedRanks& ranks) const {
  for (const TrainedStage& stage : ranks.stages) {
    download_.block(stage.model.exec());
    for (const Exec& exec : stage.optimizer.update_execs()) download_.block(exec);
  }
}

/// Writes the header, last the hash that makes it valid.
void SnapshotGeneration::complete(int64_t step, uint64_t start, const std::string& state,
                                  const std::string& values_hash) {
  state.copy(state_text().data(), state.size());
  header_->step = step;
  header_->start = start;
  header_->state_bytes = state.size();
  header_->value_bytes = layout_.values * sizeof(float);
  values_hash.copy(header_->values_hash, kHashDigits);
  header_->complete();
}

int64_t SnapshotGeneration::step() const {
  return header_->is_valid() ? header_->step : -1;
}

TrainState SnapshotGeneration::verify() const {
  await_complete();
  const SnapshotHeader& header = *header_;
  if (!header.is_valid() || header.value_bytes != layout_.values * sizeof(float) ||
      header.state_bytes > state_room_) {
    throw IoError("snapshot in memory: its header is incomplete or was changed");
  }
  const std::string name = fmt::format("snapshot of step {} in memory", header.step);
  std::vector<Chunk> chunks;
  for (const auto* all : {&layout_.slices, &layout_.residuals}) {
    for (const SnapshotSlice& slice : *all) {
      add_chunks(values(slice), values(slice), chunks);
    }
  }
  if (copy_and_hash(chunks) != std::string_view(header.values_hash, kHashDigits)) {
    throw IoError(name + ": its values do not match their hash (damaged)");
  }
  return train_state_from_text(header.state_text(), name);
}

void SnapshotGeneration::for_each(size_t stage, Moment moment, const Visit& visit) const {
  for (const SnapshotSlice& slice : layout_.slices) {
    if (slice.stage == stage && slice.moment == moment) visit(slice.begin, values(slice));
  }
}

std::vector<Tensor> SnapshotGeneration::residuals() const {
  std::vector<Tensor> all;
  for (const SnapshotSlice& slice : layout_.residuals) all.push_back(values(slice));
  return all;
}

Snapshot::Snapshot(const TrainedRanks& ranks, const TrainState& state, SnapshotArea& area,
                   const SnapshotOwner& owner, int generations)
    : layout_(ranks) {
  const size_t state_bytes = to_text(state).size();
  const bool is_same = area.has_owner() && area.differs(owner).empty() &&
                       layout_.fits(area.shape()) && area.shape().generations == generations &&
                       state_bytes + kStateRoom / 2 <= area.shape().state_room;
  if (!is_same) area.reset(owner, layout_.shape(generations, state_bytes + kStateRoom));
  for (int index = 0; index < generations; ++index) {
    generations_.emplace_back(ranks.stages.front().model.exec(), layout_, area, index);
  }
}

}  // namespace tandem
