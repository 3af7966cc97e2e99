// Documents in a range of a source's stream. A document's tokens are predicted from its own tokens
// only, and its first one from none: the prediction of the next document's first token is left out
// unless that is the source's start token, which ends a document as well as it begins one. Where a
// source says which spans loss is taken on, all other targets are left out.
#pragma once

#include <cstdint>
#include <span>

#include "engine/data/tokens/token_source.h"

namespace tandem {

/// For tokens [begin, begin + starts.size()) of the stream: the position, from `begin`, at which
/// each one's document begins, or 0 if it begins before.
void find_document_starts(const TokenSource& source, int64_t begin, std::span<int32_t> starts);
/// Number of the tokens in [begin, end) that are left out as targets.
int64_t count_ignored_targets(const TokenSource& source, int64_t begin, int64_t end);
/// Sets those of `targets`, tokens [begin, begin + targets.size()), to -1.
void ignore_targets(const TokenSource& source, int64_t begin, std::span<int32_t> targets);
/// Number of the tokens in [begin, end) that loss is taken on (TokenSource::scored_spans).
int64_t count_scored(const TokenSource& source, int64_t begin, int64_t end);
/// Sets the others of `targets`, tokens [begin, begin + targets.size()), to -1.
void ignore_unscored(const TokenSource& source, int64_t begin, std::span<int32_t> targets);

}  // namespace tandem
