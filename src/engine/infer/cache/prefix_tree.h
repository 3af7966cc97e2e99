// Pages that texts with the same first tokens share. A node is a page of the cache with the
// kPageTokens tokens whose keys and values it holds; its ancestors hold those of the tokens before.
// Texts use a path from the root; paths that no text uses stay until their pages are needed. Ranks
// that make the same calls keep the same tree.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "engine/infer/cache/page_pool.h"

namespace tandem {

class PrefixTree {
 public:
  struct Node;

  /// The nodes' pages are the pool's, which must outlive this.
  explicit PrefixTree(PagePool& pool);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  /// A text begins to use the longest path with the first tokens of `tokens`. Returns its last
  /// node, which must `leave`.
  Node* enter(std::span<const int32_t> tokens);
  /// Pages of the path to a node, in order.
  std::vector<int32_t> pages(const Node* last) const;
  /// A text at `last` goes on to the node of its next kPageTokens tokens, whose keys and values are
  /// in `page`: that becomes the node's, or is returned to the pool if there is such a node.
  Node* extend(Node* last, std::span<const int32_t> tokens, int32_t page);
  int32_t page(const Node* node) const;
  /// The text that came to `last` no longer uses its path.
  void leave(Node* last);

  /// Pages of nodes that no text uses.
  int64_t unused() const { return unused_; }
  /// Returns the page of the node that has been unused for longest and has no other after it to the
  /// pool. Requires unused() > 0.
  void drop_oldest();

 private:
  void use(Node& node);

  PagePool& pool_;
  std::unique_ptr<Node> root_;
  std::map<uint64_t, Node*> droppable_;  ///< unused ones without others after them, by age
  uint64_t clock_ = 0;
  int64_t unused_ = 0;
};

}  // namespace tandem
