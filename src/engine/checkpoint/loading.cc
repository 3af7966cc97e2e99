#include "engine/checkpoint/loading.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <vector>

#include "core/cpu/tasks.h"
#include "core/formats/safetensors.h"
#include "core/host_copy.h"
#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/sections.h"
#include "engine/config/device_traits.h"
#include "engine/model/pretrained.h"
#include "engine/parallel/collective_check.h"
#include "engine/parallel/sharded/parameter_slices.h"

namespace tandem {
namespace {

/// Elements of a GPU's memory that are in host memory at a time.
constexpr int64_t kReadChunk = 1 << 22;

/// Calls `read(slice, values)` to fill all slices of tensors whose state this rank holds: on a CPU
/// on several threads.
template <typename Read>
void for_each_slice_here(const TrainedStage& stage, Moment moment, const Read& read) {
  const Exec& exec = stage.model.exec();
  const ParameterSlices slices(stage.model.parameter_list());
  const std::vector<StateSlice> states = stage.optimizer.slices(moment, true);
  const auto read_state = [&](int64_t i) {
    const StateSlice& state = states[size_t(i)];
    for (int64_t at = 0; at < state.values.elements(); at += kReadChunk) {
      const int64_t count = std::min(kReadChunk, state.values.elements() - at);
      const int64_t begin = state.begin + at;
      const HostCopy chunk(exec, state.values.narrow(0, at, count));
      slices.for_each({begin, count}, [&](const ParameterSlice& slice) {
        read(slice, chunk.tensor().narrow(0, slice.flat - begin, slice.count));
      });
      chunk.store();
    }
  };
  const auto count = int64_t(states.size());
  if (device_traits(exec).is_host) return cpu::parallel_tasks(count, read_state);
  for (int64_t i = 0; i < count; ++i) read_state(i);  // one buffer on the host at a time
}

void read_section(const TrainedRanks& ranks, const SafetensorsFile& file, const Section& section) {
  std::vector<const SafetensorsEntry*> entries;
  for (const Parameter& p : ranks.parameter_list())
    entries.push_back(&file.require(section.prefix + p.name, p.shape));
  for (const TrainedStage& stage : ranks.stages) {
    for_each_slice_here(
        stage, section.moment, [&](const ParameterSlice& slice, const Tensor& values) {
          file.read_f32(*entries[slice.parameter], slice.whole, host_values(values));
        });
  }
}

/// Returns a note for the user, or an empty string.
std::string load_residuals(const TrainedRanks& ranks, const std::string& path) {
  const std::vector<Tensor> residuals = LiveState(ranks).residuals();
  int64_t count = 0;
  for (const Tensor& residual : residuals) count += residual.elements();
  if (!path_exists(path)) {
    if (count == 0) return "";
    return "the checkpoint holds no residuals of error feedback: they start at zero";
  }
  if (count == 0) return "the checkpoint's residuals of error feedback are not used";
  const SafetensorsFile file(path);
  const auto layout = file.metadata().find(kLayout);
  if (layout == file.metadata().end() || layout->second != ranks.layout) {
    return fmt::format(
        "the checkpoint's residuals of error feedback are of {}, this run is {}: they start at "
        "zero",
        layout == file.metadata().end() ? "an unknown layout" : layout->second, ranks.layout);
  }
  const int64_t shape[] = {count};
  const SafetensorsEntry& entry = file.require(rank_name(ranks.world.rank()), shape);
  int64_t at = 0;
  for (const Tensor& residual : residuals) {
    file.read_f32(entry, at, host_values(residual));
    at += residual.elements();
  }
  return "";
}

/// Weights that the file names with a prefix.
void load_prefixed(const TrainedRanks& ranks, const SafetensorsFile& file,
                   const std::string& prefix) {
  for (const auto& [model, optimizer] : ranks.stages) {
    std::vector<Parameter> list = model.parameter_list();
    for (Parameter& p : list) p.name = prefix + p.name;
    load_parameters(file, list, model.exec(), model.parameter_staging());
  }
}

template <typename Weights>
void load_weights(const TrainedRanks& ranks, const Weights& weights) {
  for (const auto& [model, optimizer] : ranks.stages) {
    load_parameters(weights, model.parameter_list(), model.exec(), model.parameter_staging());
  }
}

/// In this thread: long work on files has one of its own, which may not allocate memory of a GPU.
void allocate_staging(const TrainedRanks& ranks) {
  for (const TrainedStage& stage : ranks.stages) stage.model.parameter_staging();
}

void adopt_weights(const TrainedRanks& ranks) {
  for (const auto& [model, optimizer] : ranks.stages) {
    optimizer.adopt_weights(model.parameter_staging());
  }
}

/// State of one of several learners.
void load_learner(const TrainedRanks& ranks, const SafetensorsFile& weights,
                  const SafetensorsFile& moments) {
  const std::string& first = ranks.parameter_list().front().name;
  for (const Section& section : learner_sections(ranks.learner, ranks.outer)) {
    // A run whose messages left nothing out has none: this one begins with zeros.
    if (section.moment == Moment::unsent && !moments.find(section.prefix + first)) continue;
    if (section.moment == Moment::weights) {
      load_prefixed(ranks, moments, section.prefix);
      adopt_weights(ranks);
    } else {
      read_section(ranks, moments, section);
    }
  }
  read_section(ranks, weights, kAnchor);
  const bool has_momentum = moments.find(kOuterMomentum.prefix + first);
  if (has_momentum && ranks.has_outer(Moment::outer_momentum)) {
    read_section(ranks, moments, kOuterMomentum);
  }
}

void load_tensors(const TrainedRanks& ranks, const std::string& path) {
  const SafetensorsFile weights(path + "/" + kModelFile);
  const SafetensorsFile moments(path + "/" + kOptimizerFile);
  if (ranks.learners > 1) return load_learner(ranks, weights, moments);
  load_weights(ranks, weights);
  read_section(ranks, moments, kFirst);
  read_section(ranks, moments, kSecond);
  const bool has_masters = moments.find(kMaster.prefix + ranks.parameter_list().front().name);
  if (has_masters && ranks.has_masters()) return read_section(ranks, moments, kMaster);
  // Weights are sent uncompressed in this run: it resumes from the master weights.
  if (has_masters) load_prefixed(ranks, moments, kMaster.prefix);
  adopt_weights(ranks);
}

}  // namespace

std::string load_checkpoint(const TrainedRanks& ranks, const std::string& path) {
  allocate_staging(ranks);
  const auto notes = on_every_rank(ranks.world, "loading a checkpoint", ranks.bytes(), [&] {
    load_tensors(ranks, path);
    return load_residuals(ranks, path + "/" + kResidualsFile);
  });
  for (const TrainedStage& stage : ranks.stages) stage.model.parameters_changed();
  return notes[size_t(ranks.world.rank())];
}

void load_model(const TrainedRanks& ranks, const std::string& folder) {
  allocate_staging(ranks);
  on_every_rank(ranks.world, "loading a model", ranks.bytes(), [&] {
    load_weights(ranks, WeightFiles(folder));
    adopt_weights(ranks);
    return std::string();
  });
  for (const TrainedStage& stage : ranks.stages) stage.model.parameters_changed();
}

}  // namespace tandem
