#include "engine/parallel/dims.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/exec.h"
#include "comm/group.h"
#include "engine/config/device_traits.h"
#include "engine/parallel/sharded/buckets.h"
#include "schedule/context.h"
#include "tandem/error.h"

namespace tandem {

ParallelDims::ParallelDims(int tp, int dp, int ep, int pp, int learners, int cp)
    : sizes_{tp, cp, ep, ep < 1 ? 0 : dp / ep, pp, learners},
      replicas_(dp),
      state_shards_(dp * cp),
      host_copies_(dp * cp) {
  if (tp >= 1 && cp >= 1 && dp >= 1 && ep >= 1 && pp >= 1 && dp % ep == 0) return;
  throw InvalidArgument(fmt::format(
      "tp {} cp {} dp {} ep {} pp {}: expected sizes of at least 1, and ep a divisor of dp", tp, cp,
      dp, ep, pp));
}

ParallelDims::ParallelDims(const ParallelConfig& parallel)
    : ParallelDims(int(parallel.tp), int(parallel.learner_dp()), int(parallel.ep), int(parallel.pp),
                   int(parallel.sync.num_learners()), int(parallel.cp)) {
  replicas_ = int(parallel.logical_replicas()) / learners();
  state_shards_ = parallel.zero == 0 ? 1 : int(parallel.state_shards()) * cp();
  if (parallel.dp_host > 1) host_copies_ = int(parallel.dp_host) * cp();
}

int ParallelDims::ranks() const {
  int ranks = 1;
  for (const int size : sizes_) ranks *= size;
  return ranks;
}

int ParallelDims::size(Axes axes) const {
  int size = 1;
  for (int axis = 0; axis < kNumAxes; ++axis) {
    if (axes.has(axis)) size *= sizes_[size_t(axis)];
  }
  return size;
}

int ParallelDims::position(Axes axes, bool on_other_axes, int rank) const {
  int position = 0, stride = 1;
  for (int axis = 0; axis < kNumAxes; ++axis) {
    const int size = sizes_[size_t(axis)], coordinate = rank % size;
    rank /= size;
    if (axes.has(axis) == on_other_axes) continue;
    position += coordinate * stride;
    stride *= size;
  }
  return position;
}

int ParallelDims::group(Axes axes, int rank) const {
  return position(axes, true, rank);
}

int ParallelDims::index(Axes axes, int rank) const {
  return position(axes, false, rank);
}

int ParallelDims::rank_of(Axes axes, int group, int index) const {
  int rank = 0, stride = 1;
  for (int axis = 0; axis < kNumAxes; ++axis) {
    const int size = sizes_[size_t(axis)];
    int& position = axes.has(axis) ? index : group;
    rank += position % size * stride;
    position /= size;
    stride *= size;
  }
  return rank;
}

int ParallelDims::replica(int round, int rank) const {
  const int replica = round * dp() + index(kDp, rank);
  return replica < replicas_ ? replica : -1;
}

std::vector<int> ParallelDims::gradients(Axes axes, int rank) const {
  const int stride = copies() / size(axes);
  std::vector<int> all;
  for (int replica = index(kDp, rank) % stride; replica < replicas_; replica += stride) {
    for (int context = 0; context < cp(); ++context) all.push_back(replica * cp() + context);
  }
  return all;
}

std::vector<int> ParallelDims::members(Axes axes, int rank) const {
  std::vector<int> members{rank};
  int stride = 1;
  for (int axis = 0; axis < kNumAxes; ++axis) {
    const int size = sizes_[size_t(axis)], coordinate = rank / stride % size;
    if (axes.has(axis)) {
      const auto inner = std::move(members);
      members.clear();
      for (int other = 0; other < size; ++other) {
        for (const int member : inner) members.push_back(member + (other - coordinate) * stride);
      }
    }
    stride *= size;
  }
  return members;
}

int64_t ParallelDims::microbatch_position(int64_t batch, int64_t microbatch, int64_t sample) const {
  const int64_t share = batch / learners(), first = sample / share * share;
  const int64_t replica = sample % share / local_batch(batch), local = sample % local_batch(batch);
  return first + (local / microbatch * replicas_ + replica) * microbatch + local % microbatch;
}

int64_t ParallelDims::sample_at(int64_t batch, int64_t microbatch, int64_t position) const {
  const int64_t share = batch / learners(), block = position % share / microbatch;
  return position / share * share + block % replicas_ * local_batch(batch) +
         block / replicas_ * microbatch + position % microbatch;
}

std::string ParallelDims::describe() const {
  return fmt::format("tp {}{} dp {} ep {}{}{}{}", tp(), cp() > 1 ? fmt::format(" cp {}", cp()) : "",
                     dp(), ep(), pp() > 1 ? fmt::format(" pp {}", pp()) : "",
                     replicas_ > dp() ? fmt::format(" of {} replicas", replicas_) : "",
                     learners() > 1 ? fmt::format(" in {} learners", learners()) : "");
}

std::string describe_product(int64_t tp, int64_t cp, int64_t dp, int64_t pp) {
  return cp > 1 ? fmt::format("tp x cp x dp x pp = {} x {} x {} x {}", tp, cp, dp, pp)
                : fmt::format("tp x dp x pp = {} x {} x {}", tp, dp, pp);
}

int64_t microbatch_size(const ParallelConfig& parallel, const RunConfig& train) {
  return train.microbatch > 0 ? train.microbatch : ParallelDims(parallel).local_batch(train.batch);
}

int64_t microbatch_tokens(const ParallelConfig& parallel, const RunConfig& train) {
  int64_t rows = 0;
  for (int rank = 0; rank < int(parallel.cp); ++rank) {
    rows = std::max(rows, schedule::context_rows(train.seq, int(parallel.cp), rank).count());
  }
  return microbatch_size(parallel, train) * rows;
}

ParallelGroups::ParallelGroups(Communicator& world, const ParallelDims& dims, bool with_experts)
    : world_(world), dims_(dims) {
  if (world.size() != dims.ranks()) {
    throw InvalidArgument(
        fmt::format("world of {} ranks: expected {} = {}", world.size(),
                    describe_product(dims.tp(), dims.cp(), dims.dp() * dims.learners(), dims.pp()),
                    dims.ranks()));
  }
  tp_ = make("tp", kTp);
  if (dims.cp() > 1) cp_ = make("cp", kCp);
  copies_ = make("dp", kCopies);
  if (dims.pp() > 1) pp_ = make("pp", kPp);
  if (dims.learners() > 1) sync_ = make("sync", kSync);
  if (with_experts) {
    experts_ = make("experts", kExperts);
    expert_copies_ = make("expert dp", kExpertCopies);
  }
  if (dims.state_shards() > 1) state_groups_ = split_all(dims.state_shards());
  host_groups_ = split_all(dims.host_copies());
}

/// Groups of `size` ranks with copies of the parameters.
ParallelGroups::Splits ParallelGroups::split_all(int size) const {
  Splits splits;
  splits[0] = split(*copies_, size);
  if (expert_copies_) splits[1] = split(*expert_copies_, size / dims_.ep());
  return splits;
}

ParallelGroups::Split ParallelGroups::split(Communicator& ranks, int size) const {
  if (size == ranks.size()) return {};
  const RankGrid grid{size, ranks.size() / size};
  const int index = grid.index(ranks.rank()), group = grid.group(ranks.rank());
  Split split;
  split.group = ranks.split(group, index);
  split.across = ranks.split(index, group);
  return split;
}

Communicator* ParallelGroups::along(Axes axes) const {
  for (const auto& [key, communicator] : {std::pair{kTp, tp_.get()},
                                          {kCp, cp_.get()},
                                          {kCopies, copies_.get()},
                                          {kPp, pp_.get()},
                                          {kSync, sync_.get()},
                                          {kExperts, experts_.get()},
                                          {kExpertCopies, expert_copies_.get()}}) {
    if (key == axes) return communicator;
  }
  return nullptr;
}

std::vector<Communicator*> ParallelGroups::learner_axes() const {
  std::vector<Communicator*> axes = stage_axes();
  if (pp_) axes.push_back(pp_.get());
  return axes;
}

std::vector<Communicator*> ParallelGroups::world_axes() const {
  std::vector<Communicator*> axes = learner_axes();
  if (sync_) axes.push_back(sync_.get());
  return axes;
}

std::unique_ptr<Communicator> ParallelGroups::make(const char* name, Axes axes) const {
  return make_group(world_, name, dims_.members(axes, world_.rank()));
}

bool ParallelGroups::on_gpus() const {
  return !device_traits(make_exec(world_)).is_host;
}

}  // namespace tandem
