// Encodes and decodes 64 MiB of f32 (lossless: of bf16) from memory, compared with memcpy of the
// same bytes, in CPU time; so do stochastic rounding, sparse messages and the transform before
// them. Bytes per second refer to the values.
#include <benchmark/benchmark.h>

#include <cstring>
#include <string>
#include <vector>

#include "codec/dither.h"
#include "codec/topk.h"
#include "core/system/machine.h"
#include "core/version.h"
#include "kernels/dct.h"
#include "tandem/codec.h"
#include "tandem/random.h"

namespace {

using namespace tandem;

constexpr int64_t kBytes = int64_t(64) << 20;

struct Values {
  Wire wire;
  DType dtype;
  int64_t elements;
  Memory memory;
  Tensor tensor;

  explicit Values(const std::string& text)
      : wire(Wire::parse(text)),
        dtype(wire.codec == Codec::lossless ? DType::bf16 : DType::f32),
        elements(kBytes / int64_t(size_of(dtype))),
        memory(size_t(kBytes)),
        tensor(memory.view(dtype, {elements})) {
    constexpr int64_t kDrawn = 1 << 16;
    for (int64_t i = 0; i < elements; ++i) {
      float x = 0;
      for (uint64_t k = 0; i < kDrawn && k < 6; ++k) x += uniform(1, k, uint64_t(i)) - 0.5f;
      if (dtype == DType::f32) {
        float* all = tensor.as<float>();
        all[i] = i < kDrawn ? x : all[i - kDrawn];
      } else {
        auto* all = tensor.as<BFloat16>();
        all[i] = i < kDrawn ? BFloat16::from_float(x) : all[i - kDrawn];
      }
    }
  }
  void report(benchmark::State& state) const {
    state.SetBytesProcessed(state.iterations() * kBytes);
    state.counters["bits"] = wire.bits_per_element(dtype);
  }
};

void copy(benchmark::State& state) {
  const Values from("none");
  Memory to{size_t(kBytes)};
  for (auto _ : state) {
    std::memcpy(to.data(), from.memory.data(), size_t(kBytes));
    benchmark::ClobberMemory();
  }
  from.report(state);
}

void encoding(benchmark::State& state, const std::string& text) {
  const Values values(text);
  std::vector<std::byte> message(values.wire.bytes(values.elements, values.dtype));
  for (auto _ : state) benchmark::DoNotOptimize(encode(values.wire, values.tensor, message));
  values.report(state);
}

void decoding(benchmark::State& state, const std::string& text) {
  const Values values(text);
  std::vector<std::byte> message(values.wire.bytes(values.elements, values.dtype));
  encode(values.wire, values.tensor, message);
  Memory out{size_t(kBytes)};
  const Tensor decoded = out.view(values.dtype, {values.elements});
  for (auto _ : state) {
    decode(values.wire, message, decoded);
    benchmark::ClobberMemory();
  }
  values.report(state);
}

void dithering(benchmark::State& state, const std::string& text) {
  const Values values(text);
  std::vector<std::byte> message(values.wire.bytes(values.elements, values.dtype));
  for (auto _ : state) {
    benchmark::DoNotOptimize(codec::encode_dithered(values.wire, values.tensor, {1, 2}, message));
  }
  values.report(state);
}

/// The error holds what earlier messages left out, as in training.
void sparse_encoding(benchmark::State& state, const codec::TopK& topk) {
  const Values values("none");
  Memory memory{size_t(kBytes)};
  const Tensor error = memory.view(DType::f32, {values.elements});
  std::vector<std::byte> message(size_t(topk.bytes(values.elements)));
  for (int warmup = 0; warmup < 3; ++warmup) {
    encode_topk(Exec(), topk, 0.95f, values.tensor, error, message.data());
  }
  for (auto _ : state) encode_topk(Exec(), topk, 0.95f, values.tensor, error, message.data());
  values.report(state);
  state.counters["bits"] = 8 * double(message.size()) / double(values.elements);
}

void sparse_mean(benchmark::State& state, const codec::TopK& topk, int ranks) {
  const Values values("none");
  Memory memory{size_t(kBytes)};
  const Tensor error = memory.view(DType::f32, {values.elements});
  std::vector<std::byte> message(size_t(topk.bytes(values.elements)));
  encode_topk(Exec(), topk, 0.95f, values.tensor, error, message.data());
  const std::vector<const std::byte*> messages(size_t(ranks), message.data());
  for (auto _ : state) mean_topk(Exec(), topk, messages, codec::TopKMean::ranks, error);
  values.report(state);
  state.counters["bits"] = 8 * double(message.size()) / double(values.elements);
}

void transforming(benchmark::State& state, int side) {
  const Values values("none");
  Memory memory{size_t(kBytes)};
  const Tensor coefficients = memory.view(DType::f32, {values.elements});
  const DctTiles tiles = DctTiles::of(values.elements / 4096, 4096, side);
  for (auto _ : state) dct_forward(Exec(), tiles, 1, values.tensor, coefficients);
  values.report(state);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RegisterBenchmark("memcpy", copy);
  for (const char* text : {"int8", "int8:g32", "int6", "int5", "int4", "int4:g32", "int3", "int2",
                           "int4:asym", "int4:g32:hadamard", "int2:g64:asym:spikes", "e4m3", "e5m2",
                           "mxfp8", "mxfp6", "mxfp4", "lossless"}) {
    const std::string name = text;
    benchmark::RegisterBenchmark(("encode/" + name).c_str(), encoding, name);
    benchmark::RegisterBenchmark(("decode/" + name).c_str(), decoding, name);
  }
  for (const char* text : {"int8", "int4:g32", "int3"}) {
    const std::string name = text;
    benchmark::RegisterBenchmark(("dither/" + name).c_str(), dithering, name);
  }
  for (const codec::TopK& topk : {codec::TopK{4096, 64, 2}, codec::TopK{4096, 32, 8}}) {
    const std::string name = "topk/" + std::to_string(topk.k) + "/" + std::to_string(topk.bits);
    benchmark::RegisterBenchmark((name + "/encode").c_str(), sparse_encoding, topk);
    benchmark::RegisterBenchmark((name + "/mean_of_4").c_str(), sparse_mean, topk, 4);
  }
  for (const int side : {32, 64}) {
    benchmark::RegisterBenchmark(("dct/" + std::to_string(side)).c_str(), transforming, side);
  }
  benchmark::AddCustomContext("hardware", this_machine().describe());
  benchmark::AddCustomContext("commit", kCommit);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
