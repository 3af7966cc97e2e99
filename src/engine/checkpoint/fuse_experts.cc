#include "engine/checkpoint/fuse_experts.h"

#include <cstring>
#include <filesystem>
#include <span>
#include <utility>
#include <vector>

#include "core/cpu/parallel.h"
#include "core/formats/safetensors.h"
#include "engine/model/fused_tensors.h"
#include "engine/model/layout.h"

namespace tandem {
namespace {

/// Copies rows of elements of `size` bytes to their positions, `first` being that of the first.
template <typename Word>
void scatter(std::span<const std::byte> from, int64_t columns, const StoredParameter& slice,
             int64_t first, std::span<std::byte> to) {
  const auto rows = int64_t(from.size() / sizeof(Word)) / columns;
  cpu::parallel_ranges(rows, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * columns; i < end * columns; ++i) {
      const int64_t at = first + i / columns * slice.row_stride + i % columns * slice.column_stride;
      std::memcpy(to.data() + size_t(at) * sizeof(Word), from.data() + size_t(i) * sizeof(Word),
                  sizeof(Word));
    }
  });
}

/// Writes a tensor expert by expert.
void write_experts(const SafetensorsFile& file, const std::vector<Parameter>& parameters,
                   const StoredParameters& stored, DType dtype, size_t tensor,
                   SafetensorsWriter& writer) {
  int64_t elements = 1;
  for (const int64_t extent : stored.shape) elements *= extent;
  const size_t experts = size_t(stored.shape[0]), num_slices = stored.slices.size();
  const size_t slabs = num_slices % experts == 0 ? experts : 1, slab_slices = num_slices / slabs;
  const int64_t slab_elements = elements / int64_t(slabs);
  std::vector<std::byte> slab(size_t(slab_elements) * size_of(dtype));
  for (size_t i = 0; i < slabs; ++i) {
    const int64_t begin = int64_t(i) * slab_elements;
    for (size_t s = i * slab_slices; s < (i + 1) * slab_slices; ++s) {
      const StoredParameter& slice = stored.slices[s];
      const Parameter& p = parameters[slice.parameter];
      const std::vector<std::byte> values = file.data(file.require(p.name, p.shape));
      size_of(dtype) == 2
          ? scatter<uint16_t>(values, p.shape.back(), slice, slice.first - begin, slab)
          : scatter<uint32_t>(values, p.shape.back(), slice, slice.first - begin, slab);
    }
    writer.write(tensor, uint64_t(begin) * size_of(dtype), slab);
  }
  writer.set_hash(tensor, writer.tensor_hash(tensor));
}

}  // namespace

std::string fuse_experts(const std::string& path, const ModelConfig& config) {
  const std::string fused = path + ".fused";
  std::string hash;
  {
    const SafetensorsFile file(path);
    const std::vector<Parameter> parameters = ModelLayout(config, 1, 0).parameters;
    const std::vector<StoredParameters> all = stored_parameters(config, parameters);
    const DType dtype = file.entries().front().dtype;
    std::vector<SafetensorsWriter::Spec> specs;
    for (const StoredParameters& stored : all) specs.push_back({stored.name, dtype, stored.shape});
    SafetensorsWriter writer(fused, specs, {{"format", "pt"}});
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].is_strided) {
        write_experts(file, parameters, all[i], dtype, i, writer);
        continue;
      }
      writer.write(i, 0, file.data(file.require(all[i].name, all[i].shape)));
      writer.set_hash(i, writer.tensor_hash(i));
    }
    hash = writer.finish();
  }
  std::filesystem::rename(fused, path);
  return hash;
}

}  // namespace tandem
