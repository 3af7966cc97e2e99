#include "bench/engine/bench_prefill.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/infer/chunked_prefill.h"
#include "engine/infer/prefill.h"
#include "engine/model/layout.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr int64_t kVocab = kBos + 1;

ModelConfig model_of(const BenchRequest& q) {
  ModelConfig config;
  config.vocab = kVocab;
  config.hidden = q.k;
  config.layers = q.layers;
  config.head_dim = kPrefillHeadDim;
  config.heads = config.kv_heads = q.k / kPrefillHeadDim;
  config.ffn = q.n;
  config.max_seq = q.m;
  return config;
}

class PrefillCase final : public BenchCase {
 public:
  PrefillCase(Communicator& comm, const BenchRequest& q)
      : comm_(comm),
        q_(q),
        config_(model_of(q)),
        layout_(config_, comm.size(), comm.rank()),
        weights_(Exec{}, layout_, q.dtype),
        rope_(Exec{}, config_.max_seq, config_),
        cache_(Exec{}, config_, layout_, rope_, q.dtype, {pages_of(q.m), 1, q.m, q.m}),
        uncompressed_{comm, config_, layout_, weights_, q.dtype, cache_},
        encoded_{comm, config_, layout_, weights_, q.dtype, cache_, {q.wire, q.wire}},
        alone_(comm.split(comm.rank(), 0)),
        alone_context_{*alone_, config_, layout_, weights_, q.dtype, cache_},
        share_(alone_context_, q.m, 1),
        head_(uncompressed_),
        last_(DType::f32, 1, q.k),
        logits_(DType::f32, 1, kVocab, 0),
        expected_(DType::f32, 1, kVocab, 0) {
    initialize_parameters({}, layout_, config_, 1, weights_.values());
    weights_.refresh();
    for (int64_t i = 0; i < q.m; ++i) {
      tokens_.push_back(int32_t(philox(1, 0, uint64_t(i))[0] % uint64_t(kVocab)));
    }
    const OverlapOptions serial{.strategy = Strategy::serial};
    candidates_ = prefill_candidates(uncompressed_, q.m, serial);
    if (!q.wire.is_none()) encoded_candidates_ = prefill_candidates(encoded_, q.m, serial);
  }

  std::string baseline() const override {
    return "rows split over the ranks, whole collectives and GEMMs one after the other, or one "
           "chunk; time to first token";
  }
  /// This rank's share of the computation, without sums over the ranks.
  void gemm_alone() override { share_.run(tokens_, 0, last_); }
  void reference() override { run(candidates_.front(), expected_); }
  std::vector<BoundCandidate> forms() override {
    std::vector<BoundCandidate> all;
    const auto add = [&](const Prefill& each, const std::string& as) {
      all.push_back(
          {each.name + as, each.form, [&] { run(each, logits_); }, !as.empty(), each.chunks});
    };
    for (const Prefill& each : candidates_) add(each, "");
    for (const Prefill& each : encoded_candidates_) add(each, " as " + q_.wire.describe());
    return all;
  }
  bool reference_is_a_form() const override { return true; }
  bool reports_choice() const override { return true; }
  Tensor result() const override { return logits_.tensor; }
  Tensor expected() const override { return expected_.tensor; }
  bool is_same_on_all_ranks() const override { return true; }
  /// Error of the format: the difference of serial sums with it. The overlapped schedule may not
  /// add to it.
  double codec_error() override {
    run(encoded_candidates_.front(), logits_);
    const float *got = logits_.tensor.as<float>(), *wanted = expected_.tensor.as<float>();
    double maximum = 0;
    for (int64_t i = 0; i < kVocab; ++i) {
      maximum = std::max(maximum, std::fabs(double(got[i]) - double(wanted[i])));
    }
    return maximum / largest_magnitude(expected_.tensor);
  }
  int64_t wire_bytes() const override {
    const auto row = double(size_t(q_.k) * size_of(q_.dtype));
    return int64_t(double(2 * q_.layers + 1) * of_row(row));
  }
  int64_t counted_bytes() const override {
    const auto row = double(size_t(q_.k) * size_of(q_.dtype));
    const double encoded = q_.wire.is_exact()
                               ? double(q_.k) * q_.wire.bits_per_element(q_.dtype) / 8
                               : double(q_.wire.bytes(q_.k, q_.dtype));
    return int64_t(double(2 * q_.layers) * of_row(encoded) + of_row(row));
  }

 private:
  /// Bytes sent by a rank for one sum of all tokens' rows.
  double of_row(double bytes) const {
    return 2 * double(q_.m) * bytes * (comm_.size() - 1) / comm_.size();
  }
  void run(const Prefill& candidate, const BenchMatrix& to) {
    candidate.run(tokens_, 0, last_);
    const Tensor logits = head_.run(last_);
    std::memcpy(to.tensor.data(), logits.data(), logits.bytes());
  }

  Communicator& comm_;
  const BenchRequest q_;
  const ModelConfig config_;
  const ModelLayout layout_;
  Weights weights_;
  const RopeTables rope_;
  KvCache cache_;
  DecoderContext uncompressed_, encoded_;
  std::unique_ptr<Communicator> alone_;
  DecoderContext alone_context_;
  ChunkedPrefill share_;
  TokenHead head_;
  Activation last_;
  BenchMatrix logits_, expected_;
  std::vector<int32_t> tokens_;
  std::vector<Prefill> candidates_, encoded_candidates_;
};

}  // namespace

bool has_prefill() {
  return true;
}

std::unique_ptr<BenchCase> make_prefill_case(Communicator& comm, const BenchRequest& request) {
  if (!is_prefill(request.op)) return nullptr;
  return std::make_unique<PrefillCase>(comm, request);
}

}  // namespace tandem
