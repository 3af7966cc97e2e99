#include "engine/checkpoint/snapshot/snapshot_memory.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "comm/processes/shared/snapshot_memory_file.h"
#include "comm/world/host_ranks.h"
#include "engine/checkpoint/owned_loading.h"
#include "engine/checkpoint/snapshot/snapshot.h"
#include "engine/parallel/collective_check.h"
#include "tandem/collectives.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kTransferChunk = 16 << 20;

std::string text_of_bytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Number that differs between starts of a run; rank 0's.
uint64_t draw_start(Communicator& world) {
  std::random_device random;
  const uint64_t local = uint64_t(random()) << 32 | random();
  const auto all = world.exchange(std::as_bytes(std::span(&local, 1)), "start of the run");
  uint64_t start = 0;
  std::memcpy(&start, all[0].data(), sizeof start);
  return start;
}

int fd_of(const std::optional<FileDescriptor>& file) {
  return file ? file->get() : -1;
}

/// Adds the valid generations of an area.
void add_generations(const SnapshotArea& area, int holder, std::vector<FoundGeneration>& all) {
  for (int index = 0; index < area.shape().generations; ++index) {
    const SnapshotHeader& header = area.header(index);
    if (!header.is_valid()) continue;
    all.push_back({holder, area.rank(), index, header.step, header.start});
  }
}

/// Calls `move(tensor)` for the bytes, in chunks.
template <typename Move>
void in_chunks(std::byte* data, size_t bytes, const Move& move) {
  for (size_t at = 0; at < bytes; at += size_t(kTransferChunk)) {
    const auto count = std::min(kTransferChunk, int64_t(bytes - at));
    move(Tensor::of(reinterpret_cast<uint8_t*>(data + at), {count}));
  }
}

/// "rank 2: …" of the first rank with a text, and how many others have one.
std::string first_of(std::span<const std::string> texts) {
  const auto is_set = [](const std::string& text) { return !text.empty(); };
  const auto first = std::ranges::find_if(texts, is_set);
  if (first == texts.end()) return "";
  const auto others = std::ranges::count_if(texts, is_set) - 1;
  return fmt::format("rank {}: {}{}", first - texts.begin(), *first,
                     others > 0 ? fmt::format(" (and {} other ranks)", others) : "");
}

}  // namespace

SnapshotMemory::SnapshotMemory(Communicator& world, SnapshotOwner owner)
    : owner_(std::move(owner)),
      file_(open_file(owner_.rank)),
      local_(fd_of(file_), processes::kSnapshotRange * uint64_t(owner_.rank)),
      peer_(fd_of(file_), processes::kSnapshotRange * uint64_t(owner_.rank) + kAreaRange),
      start_(draw_start(world)) {}

/// Memory of this process instead if another process has the launcher's.
std::optional<FileDescriptor> SnapshotMemory::open_file(int rank) {
  try {
    return processes::open_snapshot_memory(rank);
  } catch (const IoError& error) {
    warning_ = fmt::format("{}: this process's is used", error.what());
    return {};
  }
}

/// Generations of this run in this rank's memory.
std::vector<FoundGeneration> SnapshotMemory::list() {
  std::vector<FoundGeneration> all;
  const int rank = owner_.rank;
  const auto add = [&](const SnapshotArea& area, const std::string& difference) {
    if (difference.empty()) {
      add_generations(area, rank, all);
    } else if (!has_listed_) {
      warning_ = "snapshots in memory are not used: " + difference;
    }
  };
  if (local_.has_owner()) add(local_, local_.differs(owner_));
  if (peer_.has_owner() && peer_.rank() != rank) {
    SnapshotOwner of_peer = owner_;
    of_peer.rank = peer_.rank();
    add(peer_, peer_.differs(of_peer));
  }
  has_listed_ = true;
  return all;
}

std::optional<SnapshotMemory::Found> SnapshotMemory::find(Communicator& world) {
  while (true) {
    const std::vector<FoundGeneration> found = list();
    std::vector<FoundGeneration> all;
    for (const auto& blob :
         world.exchange(std::as_bytes(std::span(found)), "snapshots in memory")) {
      const size_t before = all.size();
      all.resize(before + blob.size() / sizeof(FoundGeneration));
      std::memcpy(all.data() + before, blob.data(), blob.size());
    }
    const std::string warning = std::exchange(warning_, "");
    std::vector<std::string> warnings;
    for (const auto& blob :
         world.exchange(std::as_bytes(std::span(warning)), "snapshots in memory"))
      warnings.push_back(text_of_bytes(blob));
    if (const std::string first = first_of(warnings); !first.empty()) warnings_.push_back(first);

    const auto position = newest_common(all, world.size());
    if (!position) {
      if (!all.empty()) {
        warnings_.push_back(
            "snapshots in memory are not used: there is no step of which every "
            "rank, or its peer, has one");
      }
      return {};
    }
    std::erase_if(all, [](const FoundGeneration& each) { return each.holder == each.owner; });
    copied_ = newest_common(all, world.size());
    if (copied_ && copied_->step == position->step && copied_->start == position->start) {
      copied_.reset();
    }
    const FoundGeneration& source = position->sources[0];
    const bool is_here = source.holder == world.rank();
    SnapshotArea& area = source.owner == world.rank() ? local_ : peer_;
    const std::string text = is_here ? area.header(source.index).state_text() : "";
    const auto texts =
        world.exchange(std::as_bytes(std::span(text)), "state of training in memory");
    try {
      const std::string name = fmt::format("state of training at {}", describe(*position));
      return Found{*position,
                   train_state_from_text(text_of_bytes(texts[size_t(source.holder)]), name)};
    } catch (const IoError& error) {  // thrown on every rank
      warnings_.emplace_back(error.what());
      if (is_here) area.header(source.index).invalidate();
    }
  }
}

/// To this rank's own area, over its oldest generation.
void SnapshotMemory::receive(Communicator& comm, const FoundGeneration& from) {
  SnapshotShape shape;
  recv(comm, Tensor::of(reinterpret_cast<uint8_t*>(&shape), {int64_t(sizeof shape)}), from.holder);
  const bool is_local = local_.has_owner() && local_.differs(owner_).empty();
  if (is_local) shape.generations = local_.shape().generations;
  if (!is_local || local_.shape() != shape) local_.reset(owner_, shape);
  restored_ = local_.oldest({});
  local_.header(restored_).invalidate();
  in_chunks(local_.generation(restored_), local_.shape().generation_bytes(),
            [&](const Tensor& chunk) { recv(comm, chunk, from.holder); });
}

void SnapshotMemory::send(Communicator& comm, const FoundGeneration& from) {
  SnapshotShape shape = peer_.shape();
  tandem::send(comm, Tensor::of(reinterpret_cast<uint8_t*>(&shape), {int64_t(sizeof shape)}),
               from.owner);
  in_chunks(peer_.generation(from.index), shape.generation_bytes(),
            [&](const Tensor& chunk) { tandem::send(comm, chunk, from.owner); });
}

/// Returns the reason why the generation `restored_` cannot be used, or an empty string.
std::string SnapshotMemory::verify(const TrainedRanks& ranks, int64_t step) {
  const SnapshotLayout layout(ranks);
  if (!layout.fits(local_.shape())) {
    return "it has other tensors than this run's model and layout";
  }
  try {
    const SnapshotGeneration generation({}, layout, local_, restored_);
    if (generation.verify().step == step) return "";
    return "its state of training is of another step";
  } catch (const IoError& error) {
    return error.what();
  }
}

std::string SnapshotMemory::restore(const TrainedRanks& ranks, const SnapshotPosition& position) {
  const int rank = ranks.world.rank();
  const auto comm = split_on_host(ranks.world);
  const DiskDeadline longer(*comm);
  for (const FoundGeneration& source : position.sources) {
    if (source.holder == source.owner) {
      if (source.owner == rank) restored_ = source.index;
    } else if (source.owner == rank) {
      receive(*comm, source);
    } else if (source.holder == rank) {
      send(*comm, source);
    }
  }
  const std::vector<std::string> reasons =
      on_every_rank(*comm, "verifying snapshots in memory", ranks.bytes(),
                    [&] { return verify(ranks, position.step); });
  const std::string first = first_of(reasons);
  if (first.empty()) {
    const SnapshotLayout layout(ranks);
    load_owned(ranks, SnapshotGeneration({}, layout, local_, restored_));
    return "";
  }
  if (!reasons[size_t(rank)].empty()) local_.header(restored_).invalidate();
  restored_ = -1;
  for (const FoundGeneration& source : position.sources) {
    const bool is_copy = source.holder == rank && source.owner != rank;
    if (is_copy && !reasons[size_t(source.owner)].empty()) peer_.header(source.index).invalidate();
  }
  return first;
}

std::optional<int> SnapshotMemory::copied() const {
  if (!copied_) return {};
  for (int index = 0; index < local_.shape().generations; ++index) {
    const SnapshotHeader& header = local_.header(index);
    if (header.is_valid() && header.step == copied_->step && header.start == copied_->start) {
      return index;
    }
  }
  return -1;
}

void SnapshotMemory::erase(int64_t from_step) {
  for (SnapshotArea* area : {&local_, &peer_}) {
    if (!area->has_owner()) continue;
    for (int index = 0; index < area->shape().generations; ++index) {
      SnapshotHeader& header = area->header(index);
      if (header.is_valid() && header.step >= from_step) header.invalidate();
    }
  }
}

std::vector<std::string> SnapshotMemory::take_warnings() {
  return std::exchange(warnings_, {});
}

std::optional<int64_t> newest_snapshot(int fd, int ranks) {
  if (fd < 0) return {};
  const SnapshotArea first(fd, 0);
  if (ranks == 0 && first.has_owner()) ranks = first.ranks();
  std::vector<FoundGeneration> all;
  for (int rank = 0; rank < ranks; ++rank) {
    for (const uint64_t area_at : {uint64_t{0}, kAreaRange}) {
      const SnapshotArea area(fd, processes::kSnapshotRange * uint64_t(rank) + area_at);
      if (area.has_owner() && area.ranks() == ranks) add_generations(area, rank, all);
    }
  }
  const auto position = ranks > 0 ? newest_common(all, ranks) : std::nullopt;
  return position ? std::optional(position->step) : std::nullopt;
}

std::string describe(const SnapshotPosition& position) {
  std::vector<std::string> copies;
  for (const FoundGeneration& source : position.sources) {
    if (source.holder == source.owner) continue;
    copies.push_back(
        fmt::format("of rank {} from its copy on rank {}", source.owner, source.holder));
  }
  return fmt::format("step {} in the ranks' memory{}", position.step,
                     copies.empty() ? "" : fmt::format(" ({})", fmt::join(copies, ", ")));
}

}  // namespace tandem
