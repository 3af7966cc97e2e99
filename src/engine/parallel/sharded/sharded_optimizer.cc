#include "engine/parallel/sharded/sharded_optimizer.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/exec.h"
#include "engine/config/device_traits.h"
#include "engine/optim/optimizer.h"
#include "kernels/elementwise.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// The parameters of a group with offsets relative to its begin.
std::vector<Parameter> relative(std::vector<Parameter> list, int64_t begin) {
  for (Parameter& p : list) p.offset -= begin;
  return list;
}

/// Ranks that divide the state.
Communicator& state_ranks(const ParameterGroup& group) {
  return group.shards ? *group.shards : group.replicas;
}

/// Whether gradients are summed by host first.
bool has_hosts(const ParameterGroup& group) {
  return group.host && group.host->size() > 1 && group.across_hosts->size() > 1;
}

RankGrid make_grid(const ParameterGroup& group) {
  if (has_hosts(group)) return {group.host->size(), group.across_hosts->size()};
  if (group.copies) return {group.shards->size(), group.copies->size()};
  return {group.replicas.size(), 1};
}

}  // namespace

ShardedOptimizer::Group::Group(const Exec& model, int index, const ParameterGroup& group,
                               const WeightViews& all_weights, const GradientMemory& gradients,
                               int64_t bucket_elements, const ShardedOptimizerOptions& options,
                               size_t first_tensor_index)
    : replicas(group.replicas),
      host(has_hosts(group) ? group.host : nullptr),
      across_hosts(host ? group.across_hosts : nullptr),
      grid(make_grid(group)),
      optimizer(options.optimizer),
      exec(make_exec(replicas)),
      begin(group.range.begin),
      elements(group.range.count),
      is_gradient_window(group.is_gradient_window),
      reduces_every_pass(group.reduces_every_pass),
      replicates_state(group.replicates_state),
      logical(group.logical),
      first_tensor(first_tensor_index),
      weights(all_weights.narrow(group.range)),
      buckets(make_buckets(group, bucket_elements)),
      state_buckets(make_state_buckets(group)),
      state(exec, weights, state_buckets, replicates_state ? 0 : state_ranks(group).rank(),
            buckets.owned(replicas.rank()),
            parameter_runs(relative(group.list, begin), optimizer.find_direction != nullptr),
            WeightSync::sends_differences(state_ranks(group).size(), options.weights),
            options.outer),
      gradient_sync(
          model, host ? *across_hosts : replicas, gradients, begin,
          host ? across_buckets() : buckets, relative(group.list, begin),
          {options.gradients, options.error_feedback, options.overlap, group.is_gradient_window},
          [this](int bucket) { on_reduced(bucket); }),
      weight_sync(model, host ? *host : state_ranks(group),
                  replicates_state ? WeightViews(gradients.at(begin, elements)) : weights,
                  replicates_state ? buckets
                  : host           ? group_buckets()
                                   : state_buckets,
                  relative(group.list, begin), {options.weights, options.overlap}, state),
      squares(exec, add_terms(index)),
      norms(exec, optimizer.find_direction ? 2 * int(terms.size()) : 0) {
  const std::vector<Parameter> list = relative(group.list, begin);
  if (host) {
    host_sync.emplace(model, *host, gradients, begin, group_buckets(), list,
                      GradientSync::Options{},
                      [this](int bucket) { gradient_sync.ready(buckets.bucket(bucket)); });
  }
  if (host && !group.copies) {
    across_weights.emplace(model, *across_hosts, weights, across_buckets(), list,
                           WeightSync::Options{options.weights, options.overlap}, state);
  }
  if (options.check.share > 0) hashes.emplace(state, buckets.count(), options.check);
  if (!group.copies) return;
  refuse_on_gpu(exec, "parallel.dp_shard", "0");
  copy_sync.emplace(
      model, *group.copies, WeightViews(gradients.at(begin, elements)), across_buckets(), list,
      WeightSync::Options{.overlap = options.overlap, .in_reduction_order = true}, state);
  gather_copies();
}

Buckets ShardedOptimizer::Group::with_owners(std::vector<Shard> owned) const {
  return {buckets.window(), buckets.bucket_elements(), std::move(owned), buckets.replicas(),
          buckets.undivided()};
}

/// Shards that ranks reduce.
Buckets ShardedOptimizer::Group::make_buckets(const ParameterGroup& group,
                                              int64_t bucket_elements) const {
  std::vector<FlatRange> undivided;
  for (const FlatRange& range : group.undivided) {
    undivided.push_back({group.window.whole(range.begin - begin), range.count});
  }
  if (grid.groups == 1) {
    return {group.window, bucket_elements, replicas.size(), int(logical.size()),
            std::move(undivided)};
  }
  return {group.window, bucket_elements, grid.by_rank(), replicas.size(), std::move(undivided)};
}

/// Shards that ranks have the state of.
Buckets ShardedOptimizer::Group::make_state_buckets(const ParameterGroup& group) const {
  if (replicates_state) return with_owners({{0, buckets.replicas()}});
  return group.copies ? group_buckets() : buckets;
}

/// Returns their number.
int ShardedOptimizer::Group::add_terms(int index) {
  for (int bucket = 0; bucket < buckets.count(); ++bucket) {
    first_term.push_back(int(terms.size()));
    for (const ShardedState::Run& r : state.runs(bucket)) {
      if (!state.owns(r)) continue;
      terms.push_back({.group = index,
                       .replicated = !r.run.sharded,
                       .bucket = buckets.number(bucket),
                       .begin = buckets.window().whole(r.run.begin),
                       .replica = logical.empty() ? r.shard : logical[size_t(r.shard)]});
    }
  }
  return int(terms.size());
}

void ShardedOptimizer::Group::on_reduced(int bucket) {
  num_reduced = bucket + 1;
  int term = first_term[size_t(bucket)];
  for (const ShardedState::Run& r : state.runs(bucket)) {
    if (!state.owns(r)) continue;
    squares.add(term++, gradient_sync.reduced({r.run.begin, r.run.count}));
  }
}

void ShardedOptimizer::Group::update(
    const char* name,
    std::function<void(const ShardedState::Run& run, const Tensor& working)> apply) {
  const auto update = [this, name, apply = std::move(apply)](int bucket) {
    const ScopedSpan span(SpanKind::compute, name, bucket);
    for (const ShardedState::Run& r : state.runs(bucket)) {
      const Tensor& copy = weights.working;
      const bool is_read = weights.f32.data() || r.run.sharded;  // norms and routers: in f32
      const bool has_copy = copy.data() && is_read && !state.sends_differences();
      apply(r, has_copy ? copy.narrow(0, r.run.begin, r.run.count) : Tensor());
    }
    if (hashes) hashes->store(bucket);
  };
  if (replicates_state) return weight_sync.begin([](int) {}, update);
  if (!across_weights) return weight_sync.begin(update);
  across_weights->begin(update);
  weight_sync.begin([this](int bucket) { across_weights->await(buckets.bucket(bucket)); }, {},
                    [this](int bucket) { return across_weights->has(buckets.bucket(bucket)); });
}

/// Begins to gather the sums of the next step among the copies, each as soon as it is reduced. A
/// sum is received where gradients were that its owner has added up, thus received.
void ShardedOptimizer::Group::gather_copies() {
  num_reduced = 0;
  if (!copy_sync) return;
  copy_sync->begin([](int) {}, {}, [this](int bucket) { return bucket < num_reduced; });
}

void ShardedOptimizer::Group::finish_gradients() {
  if (host_sync) host_sync->finish();
  gradient_sync.finish();
  if (copy_sync) copy_sync->await({0, elements});
  gather_copies();
  if (replicas.size() == 1) return;
  const ScopedWait span(Phase::dp_wait, "dp_flush");  // the next backward pass overwrites them
  if (!host) return replicas.flush();
  host->flush();
  across_hosts->flush();
}

void ShardedOptimizer::Group::find_directions(const AdamStep& step) {
  int index = 0;
  for (int bucket = 0; bucket < buckets.count(); ++bucket) {
    const ScopedSpan span(SpanKind::compute, "find_direction", bucket);
    for (const ShardedState::Run& r : state.runs(bucket)) {
      const Tensor direction = gradient_sync.reduced({r.run.begin, r.run.count});
      optimizer.find_direction(exec, step, r.run.decay, {r.updated, r.first, r.second}, direction);
      norms.add(index, r.updated);
      norms.add(int(terms.size()) + index, direction);
      ++index;
    }
  }
}

void ShardedOptimizer::Group::add_norms(TrustRatios& ratios) {
  const std::vector<double> sums = norms.take();
  size_t index = 0;
  for (int bucket = 0; bucket < buckets.count(); ++bucket) {
    for (const ShardedState::Run& r : state.runs(bucket)) {
      ratios.add(first_tensor + size_t(r.run.tensor), sums[index], sums[terms.size() + index]);
      ++index;
    }
  }
}

ShardedOptimizer::ShardedOptimizer(const Exec& exec, const WeightViews& weights,
                                   const Tensor& gradients, std::vector<ParameterGroup> groups,
                                   int64_t bucket_elements, const ShardedOptimizerOptions& options)
    : exec_(exec),
      gradients_(options.gradient_memory ? *options.gradient_memory
                                         : flat_gradients_.emplace(gradients)),
      optimizer_(options.optimizer) {
  size_t num_tensors = 0;
  gradients_.on_first_write([this](const GradientUnit& unit) {
    Group& group = find_group(unit.range);
    const bool is_any = unit.sent_from <= group.begin + group.elements;
    group.gradient_sync.make_room(is_any ? unit.sent_from - group.begin : group.elements);
  });
  for (const ParameterGroup& group : groups) {
    groups_.emplace_back(exec_, int(groups_.size()), group, weights, gradients_, bucket_elements,
                         options, num_tensors);
    num_tensors += group.list.size();
  }
  if (optimizer_.find_direction) trust_ratios_.emplace(options.norm_axes, num_tensors);
}

void ShardedOptimizer::adopt_weights(const Tensor& values) {
  for (Group& group : groups_) {
    group.state.adopt_weights(values.narrow(0, group.begin, group.elements));
  }
}

ShardedOptimizer::Group& ShardedOptimizer::find_group(FlatRange range) {
  const auto found = std::ranges::find_if(groups_, [&](const Group& group) {
    return range.begin >= group.begin && range.end() <= group.begin + group.elements;
  });
  if (found != groups_.end()) return *found;
  throw InvalidArgument(fmt::format("optimizer: elements {} to {}: expected a range of one group",
                                    range.begin, range.end()));
}

void ShardedOptimizer::ready(FlatRange range) {
  Group& group = find_group(range);
  if (group.is_gradient_window) gradients_.end(range);
  (group.host_sync ? *group.host_sync : group.gradient_sync).ready(group.local(range));
}

void ShardedOptimizer::skip_pass() {
  for (Group& group : groups_) group.gradient_sync.skip_pass();
}

Squares ShardedOptimizer::reduce() {
  terms_.clear();
  for (Group& group : groups_) {
    if (!group.weight_sync.is_complete()) {
      throw InvalidArgument("optimizer: reduce: expected all weights of the step before awaited");
    }
    group.finish_gradients();
    const std::vector<double> sums = group.squares.take();
    for (size_t i = 0; i < sums.size(); ++i) {
      terms_.push_back(group.terms[i]);
      terms_.back().sum = sums[i];
    }
  }
  return sum_terms(terms_);
}

void ShardedOptimizer::update(const AdamStep& step) {
  ++updates_;
  for (Group& group : groups_) {
    if (group.hashes) group.hashes->begin_update(updates_);
  }
  if (trust_ratios_) {
    for (Group& group : groups_) group.find_directions(step);
    for (Group& group : groups_) group.add_norms(*trust_ratios_);
    trust_ratios_->reduce();
  }
  for (Group& group : groups_) {
    group.gradient_sync.keep_residuals();
    group.update(optimizer_.name, [this, &group, step](const auto& r, const Tensor& working) {
      AdamStep scaled = step;
      scaled.lr *= r.run.lr_scale;
      const double ratio =
          trust_ratios_ ? trust_ratios_->of(group.first_tensor + size_t(r.run.tensor)) : 1;
      optimizer_.update(group.exec, scaled, r.run.decay, ratio, {r.updated, r.first, r.second},
                        group.gradient_sync.reduced({r.run.begin, r.run.count}), working);
    });
  }
}

void ShardedOptimizer::gather_weights() {
  for (Group& group : groups_) {
    group.update("gather_weights", [&group](const auto& r, const Tensor& working) {
      if (working.data()) cast(group.exec, r.updated, working);
    });
  }
}

std::vector<Exec> ShardedOptimizer::update_execs() const {
  std::vector<Exec> execs;
  for (const Group& group : groups_) execs.push_back(group.exec);
  return execs;
}

void ShardedOptimizer::await(FlatRange range) {
  Group& group = find_group(range);
  group.weight_sync.await(group.local(range));
}

void ShardedOptimizer::await_all() {
  for (Group& group : groups_) group.weight_sync.await({0, group.elements});
}

void ShardedOptimizer::flush() {
  for (Group& group : groups_) {
    if (group.replicas.size() > 1) group.replicas.flush();
  }
}

void ShardedOptimizer::await_slices() {
  for (Group& group : groups_) {
    (group.across_weights ? *group.across_weights : group.weight_sync).await_local();
  }
}

void ShardedOptimizer::progress() {
  for (Group& group : groups_) {
    if (group.host_sync) group.host_sync->progress();
    group.gradient_sync.progress();
    if (group.copy_sync) group.copy_sync->progress();
    if (group.across_weights) group.across_weights->progress();
    group.weight_sync.progress();
  }
}

std::vector<ShardedOptimizer::StateGroup> ShardedOptimizer::state_groups() {
  std::vector<StateGroup> all;
  for (Group& group : groups_) all.push_back({group.replicas, {group.begin, group.elements}});
  return all;
}

std::vector<int64_t> ShardedOptimizer::find_changed_state() const {
  std::vector<int64_t> changed;
  for (const Group& group : groups_) {
    if (!group.hashes) continue;
    for (const int64_t begin : group.hashes->find_changed()) changed.push_back(group.begin + begin);
  }
  return changed;
}

void ShardedOptimizer::state_changed() {
  for (Group& group : groups_) {
    if (group.hashes) group.hashes->forget();
  }
}

std::vector<StateSlice> ShardedOptimizer::slices(Moment moment, bool all) const {
  std::vector<StateSlice> slices;
  for (const Group& group : groups_) {
    for (StateSlice slice : group.state.slices(moment, all)) {
      slice.begin += group.begin;
      slices.push_back(slice);
    }
  }
  return slices;
}

std::vector<StateSlice> ShardedOptimizer::reduced_gradients() const {
  std::vector<StateSlice> slices;
  for (const Group& group : groups_) {
    for (const StateSlice& slice : group.state.slices(Moment::first)) {
      slices.push_back({slice.begin + group.begin,
                        group.gradient_sync.reduced({slice.begin, slice.values.elements()})});
    }
  }
  return slices;
}

bool ShardedOptimizer::has_masters() const {
  return std::ranges::any_of(groups_, [](const Group& g) { return g.state.sends_differences(); });
}

std::vector<Tensor> ShardedOptimizer::residuals() {
  std::vector<Tensor> residuals;
  for (Group& group : groups_) residuals.push_back(group.gradient_sync.residual());
  return residuals;
}

ShardedOptimizer::Sent ShardedOptimizer::take_sent() {
  Sent sent;
  const auto add_gradients = [&sent](GradientSync& sync) {
    const GradientSync::Sent of_sync = sync.take_sent();
    sent.gradients += of_sync.bytes;
    sent.uncompressed_gradients += of_sync.uncompressed;
  };
  for (Group& group : groups_) {
    add_gradients(group.gradient_sync);
    if (group.host_sync) add_gradients(*group.host_sync);
    const uint64_t gathered = group.replicates_state ? group.weight_sync.take_sent()
                              : group.copy_sync      ? group.copy_sync->take_sent()
                                                     : 0;
    sent.gradients += gathered;
    sent.uncompressed_gradients += gathered;
    sent.weights += group.weight_sync.take_sent();
    if (group.across_weights) sent.weights += group.across_weights->take_sent();
  }
  return sent;
}

size_t ShardedOptimizer::state_bytes() const {
  size_t bytes = gradients_.bytes();
  for (const Group& group : groups_) {
    bytes += group.weights.bytes() + group.state.bytes() + group.gradient_sync.sum_bytes();
  }
  return bytes;
}

size_t ShardedOptimizer::bytes() const {
  size_t bytes = state_bytes();
  const auto bytes_of = [](const auto& sync) { return sync ? sync->bytes() : 0; };
  for (const Group& group : groups_) {
    bytes += group.gradient_sync.bytes() + group.weight_sync.bytes() + bytes_of(group.host_sync) +
             bytes_of(group.copy_sync) + bytes_of(group.across_weights);
  }
  return bytes;
}

int64_t ShardedOptimizer::elements() const {
  int64_t elements = 0;
  for (const Group& group : groups_) elements += group.elements;
  return elements;
}

}  // namespace tandem
