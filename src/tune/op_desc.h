// Description of an operator's computation on one rank: the single descriptor from which its
// candidates are built. visit_fields enumerates its fields for error texts, the agreement between
// ranks, the tuner's key and JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "tandem/codec.h"
#include "tandem/quantize.h"
#include "tandem/tensor.h"

namespace tandem {

/// Matrix operand of a call.
struct OperandDesc {
  const char* name = "";
  int64_t rows = 0, columns = 0;
  DType dtype = DType::f32, other = DType::f32;  ///< either is allowed
  bool any_layout = false;                       ///< dense columns are allowed, too
};

/// Collective that an operator joins to its GEMM: all_gather precedes it, the others follow it.
enum class Collective : uint8_t { all_gather, reduce_scatter, all_reduce };

struct OpDesc {
  int64_t m = 0;  ///< rows over all ranks (AG, RS) or per rank (AR)
  int64_t n = 0;  ///< output features: this rank's (AG) or all (RS, AR)
  int64_t k = 0;  ///< input features: all (AG) or this rank's (RS, AR)
  DType dtype = DType::bf16;
  bool weight_kn = false;             ///< the weight is stored [K, N] instead of [N, K]
  bool bias = false;                  ///< [N]; AG: a separate one per rank; RS, AR: added once
  DType out_dtype = DType::bf16;      ///< see result()
  Scaling scaling = Scaling::tensor;  ///< e4m3
  bool keep_gathered = false;         ///< AG+GEMM: the gathered rows include this rank's
  bool add_norm = false;              ///< GEMM+AR: an AddNorm follows the sum
  Wire wire = {};                     ///< format of the rows sent
  bool allow_uncompressed = false;    ///< uncompressed candidates in addition to a wire format's

  std::string_view op = "";  ///< a literal
  Collective collective = Collective::all_gather;
  bool gradient = false;                  ///< weight is dy; out, the weight's gradient, is added to
  bool local_n = false, local_k = false;  ///< may differ by rank
  int64_t chunk_rows = 0;                 ///< rows that are divided into chunks
  OperandDesc x = {}, weight = {}, out = {};

  bool scaled() const { return dtype == DType::e4m3; }
  bool scaled_by_row() const { return scaled() && scaling == Scaling::row; }
  /// Dtype of out and bias, and on GPUs of the partial sums.
  DType result() const { return scaled() || out_dtype == DType::f32 ? out_dtype : dtype; }
  /// Dtype of partial sums on CPU ranks.
  DType partial() const { return scaled() ? out_dtype : dtype; }
};

/// Formatting of a field. `text`: appended to the previous fields, with {} for a value.
struct Field {
  const char* name;
  const char* text;
  bool agreed;  ///< equal on every rank
};

/// Calls visit(Field, value) for every field that applies: flags only if they are set.
template <typename Visit>
void visit_fields(const OpDesc& d, Visit&& visit) {
  visit(Field{"m", " m {}", true}, d.m);
  visit(Field{"n", " n {}", !d.local_n}, d.n);
  visit(Field{"k", " k {}", !d.local_k}, d.k);
  visit(Field{"dtype", " {}", true}, name_of(d.dtype));
  if (d.result() != d.dtype) visit(Field{"out_dtype", " to {}", true}, name_of(d.out_dtype));
  if (d.scaled()) visit(Field{"scaling", ", a scale per {}", true}, name_of(d.scaling));
  if (d.keep_gathered) visit(Field{"keep_gathered", " keep", false}, true);
  if (d.bias) visit(Field{"bias", " bias", true}, true);
  if (d.weight_kn) visit(Field{"weight_kn", " kn", true}, true);
  if (d.add_norm) visit(Field{"add_norm", " add_norm", true}, true);
  if (!d.wire.is_none()) visit(Field{"wire", " as {}", true}, d.wire.describe());
  if (d.allow_uncompressed) visit(Field{"allow_uncompressed", " or uncompressed", true}, true);
}

/// Text such as "m 512 n 64 k 64 f32 bias": all that results and times depend on; the end of the
/// tuner's key.
std::string describe(const OpDesc& desc);
/// Same text for the fields that all ranks must share, for require_same.
std::string agreement(const OpDesc& desc);
nlohmann::json to_json(const OpDesc& desc);

/// Converts a tuner's key to the current format: old GPU keys had "keep" after "bias" and "kn", and
/// uncompressed candidates next to a wire format's were called "or plain".
std::string current_key(std::string key);
/// Converts an entry with its key: in addition to `current_key`, the former names of candidates.
std::pair<std::string, nlohmann::json> current_entry(std::string key, nlohmann::json entry);

}  // namespace tandem
