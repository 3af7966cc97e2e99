#include "bench/engine/bench_prefill.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "engine/infer/decoder.h"
#include "engine/infer/rows.h"
#include "engine/model/initialize.h"
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
        weights_(Exec{}, layout_, q.dtype, false),
        rope_(Exec{}, config_.max_seq, config_),
        cache_(Exec{}, config_, layout_, rope_, q.dtype, {pages_of(q.m), 1, q.m, q.m}),
        uncompressed_{comm, config_, layout_, weights_, q.dtype, cache_},
        encoded_{comm, config_, layout_, weights_, q.dtype, cache_, {q.wire, q.wire}},
        alone_(comm.split(comm.rank(), 0)),
        alone_context_{*alone_, config_, layout_, weights_, q.dtype, cache_},
        share_(alone_context_, q.m, 1),
        logits_(DType::f32, 1, kVocab, 0),
        expected_(DType::f32, 1, kVocab, 0) {
    initialize_parameters({}, layout_, config_, 1, weights_.views());
    for (int64_t i = 0; i < q.m; ++i) {
      rows_.tokens.push_back(int32_t(philox(1, 0, uint64_t(i))[0] % uint64_t(kVocab)));
      rows_.positions.push_back(int32_t(i));
    }
    rows_.sequences.assign(size_t(q.m), 0);
    for (int64_t page = 0; page < pages_of(q.m); ++page) rows_.pages.push_back(int32_t(page));
    rows_.chunks = {{0, q.m}};
    rows_.chosen = {int32_t(q.m - 1)};
    rows_.options.resize(1);
    rows_.read = {0};
    forms_ = decoders(uncompressed_);
    if (!q.wire.is_none()) encoded_forms_ = decoders(encoded_);
  }

  std::string baseline() const override {
    return "rows split over the ranks, whole collectives and GEMMs one after the other, or one "
           "chunk; time to first token";
  }
  /// This rank's share of the computation, without sums over the ranks.
  void gemm_alone() override { share_.run(rows_); }
  void reference() override { run(*forms_.front(), expected_); }
  std::vector<BoundCandidate> forms() override {
    std::vector<BoundCandidate> all;
    const auto add = [&](Decoder& decoder, const std::string& as) {
      const RowsForm& form = decoder.form();
      all.push_back(
          {form.name + as, form.form, [&] { run(decoder, logits_); }, !as.empty(), form.chunks});
    };
    for (const auto& each : forms_) add(*each, "");
    for (const auto& each : encoded_forms_) add(*each, " as " + q_.wire.describe());
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
    run(*encoded_forms_.front(), logits_);
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
  /// One for each form of the rows.
  std::vector<std::unique_ptr<Decoder>> decoders(const DecoderContext& context) const {
    const OverlapOptions serial{.strategy = Strategy::serial};
    std::vector<std::unique_ptr<Decoder>> all;
    for (const RowsForm& form : rows_forms(context, serial)) {
      all.push_back(std::make_unique<Decoder>(context, q_.m, 1,
                                              RowsOptions{.overlap = serial, .form = form}));
    }
    return all;
  }
  void run(Decoder& decoder, const BenchMatrix& to) {
    decoder.run(rows_);
    std::ranges::copy(decoder.read_logits(0), to.tensor.as<float>());
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
  Decoder share_;
  BenchMatrix logits_, expected_;
  StepRows rows_;
  std::vector<std::unique_ptr<Decoder>> forms_, encoded_forms_;
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
