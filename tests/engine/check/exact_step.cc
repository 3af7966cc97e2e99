#include "exact_step.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "engine/data/sampler.h"
#include "engine/parallel/dims.h"
#include "integer_weights.h"

namespace tandem {
namespace {

/// Sum whose terms are multiples of 2^exponent.
class Sum {
 public:
  void add(double term) {
    if (term == 0) return;
    int exponent = 0;
    const auto mantissa = int64_t(std::ldexp(std::frexp(term, &exponent), 53));
    exponent_ = std::min(exponent_, exponent - 53 + __builtin_ctzll(uint64_t(mantissa)));
    value_ += term;
    magnitude_ += std::abs(term);
  }
  double value() const { return value_; }
  double bits() const { return magnitude_ == 0 ? 0 : std::log2(magnitude_) - exponent_; }

 private:
  double value_ = 0, magnitude_ = 0;
  int exponent_ = std::numeric_limits<int>::max();
};

using Row = std::vector<double>;
using Rows = std::vector<Row>;  // by token
using Sums = std::vector<Sum>;

struct Matrix {
  int64_t rows = 0, columns = 0;
  Row values;
};

/// Gated MLP or expert on one token.
struct Gated {
  Row gate, up, inner, out;
};

/// One token's routing.
struct Routing {
  Row scores;
  std::vector<int64_t> chosen;
  double weight = 0;  ///< of each
  std::vector<Gated> experts;
};

struct BranchValues {
  Rows x, x_norm;
  Rows v, mixed;
  std::vector<Gated> mlp;
  std::vector<Routing> routing;
};

class ExactModel {
 public:
  explicit ExactModel(const ModelConfig& config) : c_(config) {}

  void forward(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
    Sequence s{{tokens.begin(), tokens.end()}, {targets.begin(), targets.end()}, {}, {}};
    const Matrix& embedding = matrix(kEmbedding, c_.vocab, c_.hidden);
    Rows x;
    for (const int32_t token : s.tokens) {
      const auto row = embedding.values.begin() + token * c_.hidden;
      x.emplace_back(row, row + c_.hidden);
    }
    for (int64_t layer = 0; layer < c_.layers; ++layer) {
      for (int position = 0; position < (c_.parallel_block ? 1 : 2); ++position)
        x = branch(layer, position, x, s);
    }
    const Row norm = vector("model.norm.weight");
    for (size_t t = 0; t < x.size(); ++t) {
      const Row x_norm = scaled(x[t], norm);
      const Row logits = product(head(), c_.vocab, x_norm);
      step_.loss +=
          std::log(double(c_.vocab)) - (logits[size_t(s.targets[t])] - std::ranges::max(logits));
    }
    s.last = std::move(x);
    sequences_.push_back(std::move(s));
  }

  /// After all forward passes. `scale`: of the loss; `groups`: sequences that share an auxiliary
  /// loss.
  void backward(double scale, const std::vector<std::vector<size_t>>& groups) {
    for (const auto& group : groups) {
      count_experts(group);
      for (const size_t i : group) backward(sequences_[i], scale, double(groups.size()));
    }
  }

  ExactStep take() {
    for (const auto& [name, sums] : gradients_) step_.gradients[name] = take(sums, name);
    return std::move(step_);
  }

 private:
  struct Sequence {
    std::vector<int32_t> tokens, targets;
    std::vector<BranchValues> branches;
    Rows last;
  };

  static constexpr const char* kEmbedding = "model.embed_tokens.weight";
  std::string head() const { return c_.tie_word_embeddings ? kEmbedding : "lm_head.weight"; }

  const Matrix& matrix(const std::string& name, int64_t rows, int64_t columns) {
    Matrix& m = matrices_[name];
    if (m.values.empty()) {
      m = {rows, columns, {}};
      for (int64_t i = 0; i < rows * columns; ++i) {
        m.values.push_back(integer_weight(c_, name, i));
      }
    }
    return m;
  }
  Row vector(const std::string& name) { return matrix(name, 1, c_.hidden).values; }
  static Row scaled(const Row& x, const Row& by) {
    Row result;
    for (size_t i = 0; i < x.size(); ++i) result.push_back(x[i] * by[i]);
    return result;
  }

  double take(const Sum& sum, const std::string& what) {
    if (sum.bits() > step_.bits) step_.bits = sum.bits(), step_.widest = what;
    return sum.value();
  }
  Row take(const Sums& sums, const std::string& what) {
    Row values;
    for (const Sum& sum : sums) values.push_back(take(sum, what));
    return values;
  }

  /// matrix x, of `rows` rows.
  Row product(const std::string& name, int64_t rows, const Row& x) {
    const Matrix& m = matrix(name, rows, int64_t(x.size()));
    Sums sums(size_t(m.rows));
    for (size_t i = 0; i < sums.size(); ++i) {
      for (size_t j = 0; j < x.size(); ++j) sums[i].add(m.values[i * x.size() + j] * x[j]);
    }
    return take(sums, name);
  }
  /// dx += matrix^T dy; the matrix's gradient += dy x^T.
  void product_backward(const std::string& name, const Row& dy, const Row& x, Sums& dx) {
    const Matrix& m = matrix(name, int64_t(dy.size()), int64_t(x.size()));
    Sums& gradient = gradients_[name];
    gradient.resize(m.values.size());
    for (size_t i = 0; i < dy.size(); ++i) {
      for (size_t j = 0; j < x.size(); ++j) {
        dx[j].add(m.values[i * x.size() + j] * dy[i]);
        gradient[i * x.size() + j].add(dy[i] * x[j]);
      }
    }
  }

  static std::string layer_name(int64_t layer) {
    return "model.layers." + std::to_string(layer) + ".";
  }
  static std::string expert_name(int64_t layer, int64_t expert) {
    return layer_name(layer) + "block_sparse_moe.experts." + std::to_string(expert) + ".";
  }

  /// `down`, `gate` and `up` are the matrices' names.
  struct GatedNames {
    std::string gate, up, down;
  };
  static GatedNames mlp_names(int64_t layer) {
    const std::string mlp = layer_name(layer) + "mlp.";
    return {mlp + "gate_proj.weight", mlp + "up_proj.weight", mlp + "down_proj.weight"};
  }
  static GatedNames expert_names(int64_t layer, int64_t expert) {
    const std::string name = expert_name(layer, expert);
    return {name + "w1.weight", name + "w3.weight", name + "w2.weight"};
  }

  Gated gated(const GatedNames& names, int64_t width, const Row& x) {
    Gated g{product(names.gate, width, x), product(names.up, width, x), {}, {}};
    for (size_t i = 0; i < g.up.size(); ++i) g.inner.push_back(g.gate[i] / 2 * g.up[i]);
    g.out = product(names.down, c_.hidden, g.inner);
    return g;
  }
  void gated_backward(const GatedNames& names, const Gated& g, const Row& dy, const Row& x,
                      Sums& dx) {
    Sums sums(g.inner.size());
    product_backward(names.down, dy, g.inner, sums);
    const Row d_inner = take(sums, names.down);
    Row d_gate, d_up;
    for (size_t i = 0; i < d_inner.size(); ++i) {
      d_gate.push_back(d_inner[i] * g.up[i] / 2);
      d_up.push_back(d_inner[i] * g.gate[i] / 2);
    }
    product_backward(names.gate, d_gate, x, dx);
    product_backward(names.up, d_up, x, dx);
  }

  Routing route(int64_t layer, const Row& x_norm) {
    const Row logits = product(router_name(layer), c_.experts, x_norm);
    const double largest = std::ranges::max(logits);
    Routing r;
    for (const double logit : logits) r.scores.push_back(logit == largest ? 1 : 0);
    const auto ties = double(std::ranges::count(r.scores, 1.0));
    for (double& score : r.scores) score /= ties;
    for (int64_t e = 0; e < c_.experts && int64_t(r.chosen.size()) < c_.top_k; ++e) {
      if (r.scores[size_t(e)] > 0) r.chosen.push_back(e);
    }
    r.weight = c_.route_scale / double(r.chosen.size());
    for (const int64_t e : r.chosen) {
      r.experts.push_back(gated(expert_names(layer, e), c_.expert_ffn, x_norm));
    }
    return r;
  }
  static std::string router_name(int64_t layer) {
    return layer_name(layer) + "block_sparse_moe.gate.weight";
  }

  bool has_attention(int position) const { return position == 0; }
  bool has_mlp(int64_t layer, int position) const {
    return c_.parallel_block || (position == 1 && !c_.is_moe(layer));
  }
  static std::string norm_name(int64_t layer, int position) {
    return layer_name(layer) +
           (position == 0 ? "input_layernorm.weight" : "post_attention_layernorm.weight");
  }

  Rows branch(int64_t layer, int position, const Rows& x, Sequence& s) {
    BranchValues b{x, {}, {}, {}, {}, {}};
    const Row norm = vector(norm_name(layer, position));
    for (const Row& row : x) b.x_norm.push_back(scaled(row, norm));
    std::vector<Sums> y(x.size(), Sums(size_t(c_.hidden)));
    const auto add_row = [&](size_t t, const Row& row, double weight = 1) {
      for (size_t i = 0; i < row.size(); ++i) y[t][i].add(weight * row[i]);
    };
    for (size_t t = 0; t < x.size(); ++t) {
      add_row(t, x[t]);
      if (has_attention(position)) {
        b.v.push_back(
            product(layer_name(layer) + "self_attn.v_proj.weight", c_.hidden, b.x_norm[t]));
        Row mixed = b.v[t];
        for (size_t i = 0; t > 0 && i < mixed.size(); ++i)
          mixed[i] = (mixed[i] + b.v[t - 1][i]) / 2;
        add_row(t, product(layer_name(layer) + "self_attn.o_proj.weight", c_.hidden, mixed));
        b.mixed.push_back(std::move(mixed));
      }
      if (has_mlp(layer, position)) {
        b.mlp.push_back(gated(mlp_names(layer), c_.ffn, b.x_norm[t]));
        add_row(t, b.mlp[t].out);
      }
      if (position == 1 && c_.is_moe(layer)) {
        b.routing.push_back(route(layer, b.x_norm[t]));
        for (const Gated& expert : b.routing[t].experts) {
          add_row(t, expert.out, b.routing[t].weight);
        }
      }
    }
    Rows sums;
    for (const Sums& row : y) sums.push_back(take(row, norm_name(layer, position)));
    s.branches.push_back(std::move(b));
    return sums;
  }

  void count_experts(const std::vector<size_t>& group) {
    balance_.clear();
    for (size_t branch = 0; branch < sequences_[group[0]].branches.size(); ++branch) {
      Row counts(size_t(c_.experts));
      double all = 0;
      for (const size_t i : group) {
        for (const Routing& r : sequences_[i].branches[branch].routing) {
          for (const int64_t e : r.chosen) ++counts[size_t(e)], ++all;
        }
      }
      for (double& count : counts) {
        count *= c_.aux_loss_coeff * double(c_.experts * c_.top_k) / all / all;
      }
      balance_.push_back(std::move(counts));
    }
  }

  void backward(const Sequence& s, double scale, double aux_losses) {
    std::vector<Sums> dx(s.last.size(), Sums(size_t(c_.hidden)));
    for (size_t t = 0; t < s.last.size(); ++t) {
      Row d_logits(size_t(c_.vocab), scale / double(c_.vocab));
      d_logits[size_t(s.targets[t])] -= scale;
      Sums d_x_norm(size_t(c_.hidden));
      product_backward(head(), d_logits, scaled(s.last[t], vector("model.norm.weight")), d_x_norm);
      norm_backward("model.norm.weight", d_x_norm, s.last[t], dx[t]);
    }
    Rows dy;
    for (size_t i = s.branches.size(); i-- > 0;) {
      const int per_layer = c_.parallel_block ? 1 : 2;
      dy.clear();
      for (const Sums& row : dx) dy.push_back(take(row, "residual gradient"));
      branch_backward(int64_t(i) / per_layer, int(i) % per_layer, s.branches[i], dy, balance_[i],
                      aux_losses, dx);
      // The next branch's terms are added to the sum as it is.
      for (Sums& row : dx) {
        for (Sum& sum : row) {
          const double value = take(sum, "residual gradient");
          sum = {};
          sum.add(value);
        }
      }
    }
    Sums& gradient = gradients_[kEmbedding];
    gradient.resize(size_t(c_.vocab * c_.hidden));
    for (size_t t = 0; t < dx.size(); ++t) {
      for (size_t i = 0; i < dx[t].size(); ++i) {
        gradient[size_t(s.tokens[t]) * dx[t].size() + i].add(dx[t][i].value());
      }
    }
  }

  void norm_backward(const std::string& name, const Sums& d_x_norm, const Row& x, Sums& dx) {
    const Row weight = vector(name), d = take(d_x_norm, name);
    Sums& gradient = gradients_[name];
    gradient.resize(d.size());
    for (size_t i = 0; i < d.size(); ++i) {
      dx[i].add(weight[i] * d[i]);
      gradient[i].add(d[i] * x[i]);
    }
  }

  void branch_backward(int64_t layer, int position, const BranchValues& b, const Rows& dy,
                       const Row& balance, double aux_losses, std::vector<Sums>& dx) {
    std::vector<Sums> d_x_norm(dy.size(), Sums(size_t(c_.hidden)));
    if (has_attention(position)) attention_backward(layer, b, dy, d_x_norm);
    for (size_t t = 0; t < dy.size(); ++t) {
      if (has_mlp(layer, position)) {
        gated_backward(mlp_names(layer), b.mlp[t], dy[t], b.x_norm[t], d_x_norm[t]);
      }
      if (!b.routing.empty()) {
        routing_backward(layer, b.routing[t], dy[t], b.x_norm[t], balance, aux_losses, d_x_norm[t]);
      }
      norm_backward(norm_name(layer, position), d_x_norm[t], b.x[t], dx[t]);
    }
  }

  void attention_backward(int64_t layer, const BranchValues& b, const Rows& dy,
                          std::vector<Sums>& d_x_norm) {
    const std::string name = layer_name(layer) + "self_attn.";
    for (const char* zero : {"q_proj.weight", "k_proj.weight"}) {
      gradients_[name + zero].resize(size_t(c_.hidden * c_.hidden));
    }
    std::vector<Sums> dv(dy.size(), Sums(size_t(c_.hidden)));
    for (size_t t = 0; t < dy.size(); ++t) {
      Sums sums(size_t(c_.hidden));
      product_backward(name + "o_proj.weight", dy[t], b.mixed[t], sums);
      const Row d_mixed = take(sums, name);
      for (size_t i = 0; i < d_mixed.size(); ++i) {
        dv[t][i].add(t > 0 ? d_mixed[i] / 2 : d_mixed[i]);
        if (t > 0) dv[t - 1][i].add(d_mixed[i] / 2);
      }
    }
    for (size_t t = 0; t < dy.size(); ++t) {
      product_backward(name + "v_proj.weight", take(dv[t], name), b.x_norm[t], d_x_norm[t]);
    }
  }

  void routing_backward(int64_t layer, const Routing& r, const Row& dy, const Row& x_norm,
                        const Row& balance, double aux_losses, Sums& d_x_norm) {
    const auto num_experts = size_t(c_.experts);
    Row d_scores(num_experts), d_weights;
    for (size_t k = 0; k < r.chosen.size(); ++k) {
      Sum d_weight;
      Row d_out;
      for (size_t i = 0; i < dy.size(); ++i) {
        d_weight.add(dy[i] * r.experts[k].out[i]);
        d_out.push_back(dy[i] * r.weight);
      }
      d_weights.push_back(take(d_weight, router_name(layer)));
      gated_backward(expert_names(layer, r.chosen[k]), r.experts[k], d_out, x_norm, d_x_norm);
    }
    double chosen = 0, along = 0, mean = 0;
    for (size_t k = 0; k < r.chosen.size(); ++k) {
      chosen += r.scores[size_t(r.chosen[k])];
      along += d_weights[k] / double(r.chosen.size());
    }
    for (size_t k = 0; k < r.chosen.size(); ++k) {
      d_scores[size_t(r.chosen[k])] = (d_weights[k] - along) * c_.route_scale / chosen;
    }
    for (size_t e = 0; e < num_experts; ++e) mean += balance[e] * r.scores[e];
    for (size_t e = 0; e < num_experts; ++e) d_scores[e] += (balance[e] - mean) / aux_losses;
    double dot = 0;
    for (size_t e = 0; e < num_experts; ++e) dot += d_scores[e] * r.scores[e];
    Row d_logits;
    for (size_t e = 0; e < num_experts; ++e) d_logits.push_back(r.scores[e] * (d_scores[e] - dot));
    product_backward(router_name(layer), d_logits, x_norm, d_x_norm);
  }

  ModelConfig c_;
  std::map<std::string, Matrix> matrices_;
  std::map<std::string, Sums> gradients_;
  std::vector<Sequence> sequences_;
  Rows balance_;  // by branch
  ExactStep step_;
};

}  // namespace

ExactStep compute_exact_step(const TrainConfig& config, const Corpus& corpus) {
  const int64_t batch = config.train.batch, seq = config.train.seq;
  const Sampler sampler(corpus, seq, uint64_t(config.train.seed));
  ExactModel model(config.model);
  std::vector<int32_t> tokens(static_cast<size_t>(seq)), targets(tokens.size());
  for (int64_t sample = 0; sample < batch; ++sample) {
    sampler.read(sample, tokens, targets);
    model.forward(tokens, targets);
  }
  const bool whole_step = config.train.aux_loss_scope == "step";
  const ParallelDims dims(config.parallel);
  const int64_t microbatch =
      whole_step ? batch : microbatch_size(config.parallel, config.train) * dims.dp();
  std::vector<std::vector<size_t>> groups(size_t(batch / microbatch));
  for (int64_t position = 0; position < batch; ++position) {
    groups[size_t(position / microbatch)].push_back(
        size_t(dims.sample_at(batch, microbatch_size(config.parallel, config.train), position)));
  }
  model.backward(1 / double(batch * seq), groups);
  ExactStep step = model.take();
  step.loss /= double(batch * seq);
  return step;
}

}  // namespace tandem
