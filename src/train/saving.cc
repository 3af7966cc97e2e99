#include "train/saving.h"

#include <cstring>

#include "core/safetensors.h"
#include "model/pretrained.h"

namespace tandem {
namespace {

constexpr const char* kFirst = "m.";
constexpr const char* kSecond = "v.";

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

}  // namespace

void save_checkpoint(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                     const ModelConfig& model, CheckpointKeeper* keeper) {
  const auto& list = ranks.model.parameter_list();
  const bool root = ranks.root();
  const std::vector<float> m = collect(ranks, DataParallel::Moment::first);
  const std::vector<float> v = collect(ranks, DataParallel::Moment::second);
  if (!ranks.first_replica()) return;
  TensorGather gather(ranks.gathering(), ranks.tp.size(), list);
  std::unique_ptr<CheckpointWriter> checkpoint;
  std::unique_ptr<SafetensorsWriter> moments;
  std::map<std::string, std::string> hashes;
  if (root) checkpoint = std::make_unique<CheckpointWriter>(out, state.step);
  const std::string path = root ? checkpoint->path("model.safetensors") : "";
  hashes["model.safetensors"] = write_model(ranks, gather, path, root);
  if (root) {
    auto specs = specs_of(list, kFirst);
    for (auto& spec : specs_of(list, kSecond)) specs.push_back(spec);
    moments = std::make_unique<SafetensorsWriter>(checkpoint->path("optimizer.safetensors"),
                                                  std::move(specs));
  }
  write_tensors(gather, m, moments.get());
  write_tensors(gather, v, moments.get());
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

void load_checkpoint(const TrainedRanks& ranks, const std::string& path) {
  const auto& list = ranks.model.parameter_list();
  load_parameters(SafetensorsFile(path + "/model.safetensors"), list, ranks.model.parameters());
  ranks.model.parameters_changed();
  const SafetensorsFile moments(path + "/optimizer.safetensors");
  std::vector<float> whole(ranks.model.parameters().size());
  load_parameters(moments, with_prefix(list, kFirst), whole);
  restore(ranks, DataParallel::Moment::first, whole);
  load_parameters(moments, with_prefix(list, kSecond), whole);
  restore(ranks, DataParallel::Moment::second, whole);
}

}  // namespace tandem
