#include "train/saving.h"

#include <fmt/format.h>

#include <cstring>

#include "core/safetensors.h"
#include "model/pretrained.h"

namespace tandem {
namespace {

constexpr const char* kFirst = "m.";
constexpr const char* kSecond = "v.";
constexpr const char* kMaster = "w.";
constexpr const char* kLayout = "layout";

std::vector<SafetensorsWriter::Spec> specs_of(std::span<const Parameter> list,
                                              const std::string& prefix) {
  std::vector<SafetensorsWriter::Spec> specs;
  for (const Parameter& p : list) specs.push_back({prefix + p.name, DType::f32, p.shape});
  return specs;
}

std::vector<Parameter> with_prefix(std::vector<Parameter> list, const std::string& prefix) {
  for (Parameter& p : list) p.name = prefix + p.name;
  return list;
}

/// Runs on the DP rank 0 of every TP rank; `writer` stands on rank 0 of all.
void write_tensors(TensorGather& gather, std::span<const float> flat, SafetensorsWriter* writer) {
  for (size_t i = 0; i < gather.size(); ++i) {
    const std::span<const float> whole = gather.gather(i, flat);
    if (writer) writer->write(std::as_bytes(whole));
  }
}

}  // namespace

TensorGather::TensorGather(Communicator& ranks, int tp, std::span<const Parameter> list)
    : ranks_(ranks), list_(list) {
  std::vector<Range> mine;
  for (const Parameter& p : list) {
    const bool held = p.expert >= 0 || ranks.rank() < tp;
    mine.push_back({p.begin, held ? p.count : 0});
  }
  for (const auto& blob : ranks.exchange(std::as_bytes(std::span(mine)), "parameter ranges")) {
    ranges_.emplace_back(blob.size() / sizeof(Range));
    if (!blob.empty()) std::memcpy(ranges_.back().data(), blob.data(), blob.size());
  }
}

std::span<const float> TensorGather::gather(size_t i, std::span<const float> flat) {
  const Parameter& p = list_[i];
  const bool root = ranks_.rank() == 0;
  int64_t elements = 1;
  for (const int64_t extent : p.shape) elements *= extent;
  if (root) whole_.resize(size_t(elements));
  const int64_t columns = p.shape.size() == 1 ? p.shape[0] : p.shape[1];
  for (int rank = 0; rank < (p.shard_dim < 0 ? 1 : ranks_.size()); ++rank) {
    if (!root && rank != ranks_.rank()) continue;
    Parameter part = p;  // as that rank holds it
    if (p.shard_dim >= 0) {
      part.begin = ranges_[size_t(rank)][i].begin;
      part.count = ranges_[size_t(rank)][i].count;
    }
    const LocalShape shape = local_shape(part);
    part_.resize(size_t(shape.rows * shape.cols));
    if (part_.empty()) continue;
    if (rank == ranks_.rank()) {
      for (int64_t row = 0; row < shape.rows; ++row) {
        std::copy_n(flat.begin() + p.offset + row * shape.row_stride, shape.cols,
                    part_.begin() + row * shape.cols);
      }
    }
    const Tensor wire(part_.data(), DType::f32, {int64_t(part_.size())});
    if (rank != 0) root ? recv(ranks_, wire, rank) : send(ranks_, wire, 0);
    if (!root) continue;
    const int64_t first = p.shard_dim == 0   ? part.begin * (p.shape.size() == 1 ? 1 : columns)
                          : p.shard_dim == 1 ? part.begin
                                             : 0;
    for (int64_t row = 0; row < shape.rows; ++row) {
      std::copy_n(part_.begin() + row * shape.cols, shape.cols,
                  whole_.begin() + first + row * columns);
    }
  }
  return root ? std::span<const float>(whole_) : std::span<const float>();
}

namespace {

std::string write_model(const TrainedRanks& ranks, TensorGather& gather, const std::string& path,
                        bool root) {
  const auto& list = ranks.model.parameter_list();
  std::unique_ptr<SafetensorsWriter> writer;
  if (root) {
    writer = std::make_unique<SafetensorsWriter>(
        path, specs_of(list, ""), std::map<std::string, std::string>{{"format", "pt"}});
  }
  write_tensors(gather, ranks.model.parameters(), writer.get());
  return root ? writer->finish() : "";
}

}  // namespace

namespace {

/// One moment of all that this rank holds, where it is of the first replica.
std::vector<float> collect(const TrainedRanks& ranks, DataParallel::Moment moment) {
  std::vector<float> all = ranks.optimizer.collect(moment);
  if (!ranks.expert_optimizer) return all;
  all.resize(size_t(ranks.model.experts_begin()));  // nothing but zeros on later EP ranks
  const std::vector<float> experts = ranks.expert_optimizer->collect(moment);
  all.insert(all.end(), experts.begin(), experts.end());
  return all;
}

void restore(const TrainedRanks& ranks, DataParallel::Moment moment, std::span<const float> all) {
  const auto begin = size_t(ranks.model.experts_begin());
  ranks.optimizer.restore(moment, all.first(begin));
  if (ranks.expert_optimizer) ranks.expert_optimizer->restore(moment, all.subspan(begin));
}

std::vector<std::span<float>> residuals(const TrainedRanks& ranks) {
  std::vector<std::span<float>> all{ranks.optimizer.residual()};
  if (ranks.expert_optimizer) all.push_back(ranks.expert_optimizer->residual());
  return all;
}

std::string name_of_rank(int rank) {
  return fmt::format("rank.{}", rank);
}

/// One array a rank of the world. Returns the header's hash on rank 0; nothing where there are no
/// residuals.
std::string write_residuals(const TrainedRanks& ranks, const CheckpointWriter* checkpoint) {
  std::vector<float> mine;
  for (const auto part : residuals(ranks)) mine.insert(mine.end(), part.begin(), part.end());
  const int64_t count = int64_t(mine.size());
  std::vector<SafetensorsWriter::Spec> specs;
  int64_t total = 0;
  for (const auto& blob : ranks.world.exchange(std::as_bytes(std::span(&count, 1)), "residuals")) {
    int64_t theirs = 0;
    std::memcpy(&theirs, blob.data(), sizeof theirs);
    specs.push_back({name_of_rank(int(specs.size())), DType::f32, {theirs}});
    total += theirs;
  }
  if (total == 0) return "";
  if (!checkpoint) {
    send(ranks.world, Tensor(mine.data(), DType::f32, {count}), 0);
    return "";
  }
  SafetensorsWriter writer(checkpoint->path(kResidualsFile), specs, {{kLayout, ranks.layout}});
  for (int rank = 0; rank < ranks.world.size(); ++rank) {
    mine.resize(size_t(specs[size_t(rank)].shape[0]));
    if (rank > 0) recv(ranks.world, Tensor(mine.data(), DType::f32, {int64_t(mine.size())}), rank);
    writer.write(std::as_bytes(std::span(mine)));
  }
  return writer.finish();
}

/// Returns what there is to say.
std::string load_residuals(const TrainedRanks& ranks, const std::string& path) {
  size_t count = 0;
  for (const auto part : residuals(ranks)) count += part.size();
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
  const int64_t shape[] = {int64_t(count)};
  const SafetensorsEntry& entry = file.require(name_of_rank(ranks.world.rank()), shape);
  int64_t at = 0;
  for (const auto part : residuals(ranks)) {
    file.read_f32(entry, at, part);
    at += int64_t(part.size());
  }
  return "";
}

}  // namespace

void save_checkpoint(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                     const ModelConfig& model, CheckpointKeeper* keeper) {
  const auto& list = ranks.model.parameter_list();
  const bool root = ranks.root();
  const std::vector<float> m = collect(ranks, DataParallel::Moment::first);
  const std::vector<float> v = collect(ranks, DataParallel::Moment::second);
  const bool has_masters = ranks.optimizer.has_masters();
  std::vector<float> masters;
  if (has_masters) masters = collect(ranks, DataParallel::Moment::master);
  std::unique_ptr<CheckpointWriter> checkpoint;
  std::unique_ptr<SafetensorsWriter> moments;
  std::map<std::string, std::string> hashes;
  if (root) checkpoint = std::make_unique<CheckpointWriter>(out, state.step);
  const std::string residuals_hash = write_residuals(ranks, checkpoint.get());
  if (!residuals_hash.empty()) hashes[kResidualsFile] = residuals_hash;
  if (!ranks.first_replica()) return;
  TensorGather gather(ranks.gathering(), ranks.tp.size(), list);
  const std::string path = root ? checkpoint->path("model.safetensors") : "";
  hashes["model.safetensors"] = write_model(ranks, gather, path, root);
  if (root) {
    auto specs = specs_of(list, kFirst);
    for (auto& spec : specs_of(list, kSecond)) specs.push_back(spec);
    if (has_masters) {
      for (auto& spec : specs_of(list, kMaster)) specs.push_back(spec);
    }
    moments = std::make_unique<SafetensorsWriter>(checkpoint->path("optimizer.safetensors"),
                                                  std::move(specs));
  }
  write_tensors(gather, m, moments.get());
  write_tensors(gather, v, moments.get());
  if (has_masters) write_tensors(gather, masters, moments.get());
  if (!root) return;
  hashes["optimizer.safetensors"] = moments->finish();
  checkpoint->commit(state, model, hashes);
  keeper->saved(checkpoint_path(out, state.step));
}

void save_final(const TrainedRanks& ranks, const std::string& out, const ModelConfig& model) {
  if (!ranks.first_replica()) return;
  TensorGather gather(ranks.gathering(), ranks.tp.size(), ranks.model.parameter_list());
  if (!ranks.root()) {
    write_model(ranks, gather, "", false);
    return;
  }
  replace_directory(out, "final", [&](const std::string& directory) {
    write_model(ranks, gather, directory + "/model.safetensors", true);
    write_file(directory + "/config.json", to_json(model));
  });
}

std::string load_checkpoint(const TrainedRanks& ranks, const std::string& path) {
  const auto& list = ranks.model.parameter_list();
  load_parameters(SafetensorsFile(path + "/model.safetensors"), list, ranks.model.parameters());
  const SafetensorsFile moments(path + "/optimizer.safetensors");
  std::vector<float> whole(ranks.model.parameters().size());
  load_parameters(moments, with_prefix(list, kFirst), whole);
  restore(ranks, DataParallel::Moment::first, whole);
  load_parameters(moments, with_prefix(list, kSecond), whole);
  restore(ranks, DataParallel::Moment::second, whole);
  // A run whose weights travel as they are goes on from the owners'.
  if (moments.find(kMaster + list.front().name)) {
    load_parameters(moments, with_prefix(list, kMaster), whole);
    restore(ranks, DataParallel::Moment::master, whole);
  } else {
    ranks.optimizer.adopt_parameters();
    if (ranks.expert_optimizer) ranks.expert_optimizer->adopt_parameters();
  }
  ranks.model.parameters_changed();
  return load_residuals(ranks, path + "/" + kResidualsFile);
}

}  // namespace tandem
