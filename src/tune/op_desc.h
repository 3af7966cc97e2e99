// What an operator computes, as one rank sees it: the one descriptor that its candidates are made
// of. Whatever a field has to appear in, it appears in by visit_fields: the description of an
// error, the agreement between ranks, the tuner's key, and JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "tandem/codec.h"
#include "tandem/quantize.h"
#include "tandem/tensor.h"

namespace tandem {

/// A matrix that a call is given.
struct OperandDesc {
  const char* name = "";
  int64_t rows = 0, columns = 0;
  DType dtype = DType::f32, other = DType::f32;  ///< either is right
  bool any_layout = false;                       ///< also with dense columns instead of dense rows
};

struct OpDesc {
  int64_t m = 0;  ///< rows over all ranks (AG, RS) or on each (AR)
  int64_t n = 0;  ///< output features: this rank's (AG) or all (RS, AR)
  int64_t k = 0;  ///< input features: all (AG) or this rank's (RS, AR)
  DType dtype = DType::bf16;
  bool weight_kn = false;             ///< the weight is stored [K, N] instead of [N, K]
  bool bias = false;                  ///< [N]; AG: every rank's own; RS, AR: added once
  DType out_dtype = DType::bf16;      ///< see result()
  Scaling scaling = Scaling::tensor;  ///< e4m3
  bool keep_gathered = false;         ///< AG+GEMM: the gather has the own rows too
  bool add_norm = false;              ///< GEMM+AR: an AddNorm follows the sum
  Wire wire = {};                     ///< of the rows that travel
  bool or_plain = false;              ///< with a wire: candidates without it, too

  std::string_view op = "";           ///< a literal
  bool own_n = false, own_k = false;  ///< may differ by rank
  int64_t chunk_rows = 0;             ///< what chunks divide
  OperandDesc x = {}, weight = {}, out = {};

  bool scaled() const { return dtype == DType::e4m3; }
  bool scaled_by_row() const { return scaled() && scaling == Scaling::row; }
  /// Of out and of bias, and on GPUs of the partial sums.
  DType result() const { return scaled() || out_dtype == DType::f32 ? out_dtype : dtype; }
};

/// How a field is written. `text`: behind the fields before it, with {} for a value.
struct Field {
  const char* name;
  const char* text;
  bool agreed;  ///< the same on every rank
};

/// visit(Field, value) of every field that says something: flags only where they are set.
template <typename Visit>
void visit_fields(const OpDesc& d, Visit&& visit) {
  visit(Field{"m", " m {}", true}, d.m);
  visit(Field{"n", " n {}", !d.own_n}, d.n);
  visit(Field{"k", " k {}", !d.own_k}, d.k);
  visit(Field{"dtype", " {}", true}, name_of(d.dtype));
  if (d.result() != d.dtype) visit(Field{"out_dtype", " to {}", true}, name_of(d.out_dtype));
  if (d.scaled()) visit(Field{"scaling", ", a scale per {}", true}, name_of(d.scaling));
  if (d.keep_gathered) visit(Field{"keep_gathered", " keep", false}, true);
  if (d.bias) visit(Field{"bias", " bias", true}, true);
  if (d.weight_kn) visit(Field{"weight_kn", " kn", true}, true);
  if (d.add_norm) visit(Field{"add_norm", " add_norm", true}, true);
  if (!d.wire.is_none()) visit(Field{"wire", " as {}", true}, d.wire.describe());
  if (d.or_plain) visit(Field{"or_plain", " or plain", true}, true);
}

/// "m 512 n 64 k 64 f32 bias": all that results and times depend on; the tuner's key ends so.
std::string describe(const OpDesc& desc);
/// The same of what all ranks must share, for require_same.
std::string agreement(const OpDesc& desc);
nlohmann::json to_json(const OpDesc& desc);

/// A tuner's key as it is written today: those of GPUs once had "keep" behind "bias" and "kn".
std::string current_key(std::string key);

}  // namespace tandem
