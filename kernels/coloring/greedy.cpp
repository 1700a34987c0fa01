// Greedy distance-2, star and acyclic colorings of graphs in compressed sparse rows (CSR); dynamic vertex orders;
// rooted forests.
//
// In a given order, each vertex gets the smallest color that no condition forbids. The result does not depend on how
// color sets are stored, so the tests compare it with the same algorithms in Python, in hodiff/sparse/coloring/. The
// caller allocates all memory. Vertices and entries are 32-bit; -1 means not colored yet, no vertex, or no entry.

#include <cstdint>
#include <cstring>

namespace {

using std::int32_t;
using std::int64_t;
using std::uint64_t;

constexpr int32_t NONE = -1;

// The neighbours of v are columns[starts[v]] to columns[starts[v + 1] - 1].
struct Graph {
  const int32_t* starts;
  const int32_t* columns;
  const int32_t* begin(int32_t v) const { return columns + starts[v]; }
  const int32_t* end(int32_t v) const { return columns + starts[v + 1]; }
};

// A set of colors for each vertex; `kinds` objects share the memory. A set is stored as bits if they need no more words
// than a list with a color per neighbour, else as a list. So an object needs about four bytes per entry of the matrix
// at most, and unions are cheap.
class Sets {
 public:
  Sets(const int64_t* room, uint64_t* memory, int32_t* counts, int64_t words, int kinds, int kind)
      : room_(room), memory_(memory), counts_(counts), words_(words), kinds_(kinds), kind_(kind) {}

  bool contains(int32_t v, int32_t color) const {
    if (is_bits(v)) return at(v)[color >> 6] >> (color & 63) & 1;
    const int32_t* list = list_of(v);
    for (int32_t i = 0; i < count(v); ++i)
      if (list[i] == color) return true;
    return false;
  }

  void add(int32_t v, int32_t color) {
    if (is_bits(v)) {
      at(v)[color >> 6] |= uint64_t{1} << (color & 63);
    } else if (!contains(v, color)) {
      list_of(v)[count(v)++] = color;
    }
  }

  // Add the set of v to the bits `into`.
  void join(int32_t v, uint64_t* into) const {
    if (is_bits(v)) {
      const uint64_t* mine = at(v);
      for (int64_t i = 0; i < words_; ++i) into[i] |= mine[i];
      return;
    }
    const int32_t* list = list_of(v);
    for (int32_t i = 0; i < count(v); ++i) into[list[i] >> 6] |= uint64_t{1} << (list[i] & 63);
  }

 private:
  int64_t size(int32_t v) const { return room_[v + 1] - room_[v]; }
  // `counts` has the length of a list, and -1 for bits.
  bool is_bits(int32_t v) const { return counts_[int64_t{v} * kinds_ + kind_] < 0; }
  uint64_t* at(int32_t v) const { return memory_ + kinds_ * room_[v] + kind_ * size(v); }
  int32_t* list_of(int32_t v) const { return reinterpret_cast<int32_t*>(at(v)); }
  int32_t& count(int32_t v) const { return counts_[int64_t{v} * kinds_ + kind_]; }

  const int64_t* room_;
  uint64_t* memory_;
  int32_t* counts_;
  int64_t words_;
  int kinds_, kind_;
};

// The smallest color that is not forbidden, or -1 if all 64 * words are.
int32_t first_free(const uint64_t* forbidden, int64_t words) {
  for (int64_t i = 0; i < words; ++i)
    if (~forbidden[i]) return static_cast<int32_t>(64 * i + __builtin_ctzll(~forbidden[i]));
  return NONE;
}

// Union-find with path halving and union by size. A root is its own parent.
struct Components {
  int32_t* parent;
  int32_t* size;
  int32_t find(int32_t i) const {
    while (parent[i] != i) i = parent[i] = parent[parent[i]];
    return i;
  }
  void unite(int32_t a, int32_t b) const {
    a = find(a), b = find(b);
    if (a == b) return;
    if (size[a] < size[b]) {
      const int32_t other = a;
      a = b, b = other;
    }
    parent[b] = a;
    size[a] += size[b];
  }
};

// Bucket queue: doubly linked lists of the vertices of each degree. The vertex that was entered last comes first.
struct Buckets {
  int32_t *heads, *next, *previous, *degrees;
  void enter(int32_t v) const {
    int32_t& head = heads[degrees[v]];
    previous[v] = NONE;
    next[v] = head;
    if (head != NONE) previous[head] = v;
    head = v;
  }
  void leave(int32_t v) const {
    if (previous[v] == NONE)
      heads[degrees[v]] = next[v];
    else
      next[previous[v]] = next[v];
    if (next[v] != NONE) previous[next[v]] = previous[v];
  }
};

// Visit each neighbour of v once. If `rows` is given, `graph` has the rows of each column, and neighbours are columns
// that share a row.
template <typename Visit>
void each_neighbor(const Graph& graph, const Graph& rows, int32_t* visited, int32_t mark, int32_t v, Visit visit) {
  if (!rows.starts) {
    for (const int32_t* w = graph.begin(v); w != graph.end(v); ++w)
      if (*w != v) visit(*w);
    return;
  }
  visited[v] = mark;
  for (const int32_t* row = graph.begin(v); row != graph.end(v); ++row)
    for (const int32_t* w = rows.begin(*row); w != rows.end(*row); ++w)
      if (visited[*w] != mark) {
        visited[*w] = mark;
        visit(*w);
      }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Distance-2 coloring: columns that share a row get different colors. `starts` and `rows` are compressed columns (CSC).
// Returns the number of colors, or -1 if 64 * words are too few.
EXPORT long hodiff_color_distance2(long n, const int32_t* starts, const int32_t* rows, const int32_t* order, long words,
                                   const int64_t* room, uint64_t* memory, int32_t* counts, uint64_t* forbidden,
                                   int32_t* colors) {
  const Graph graph{starts, rows};
  Sets seen(room, memory, counts, words, 1, 0);
  int32_t used = 0;
  for (long i = 0; i < n; ++i) {
    const int32_t v = order[i];
    std::memset(forbidden, 0, words * sizeof *forbidden);
    for (const int32_t* row = graph.begin(v); row != graph.end(v); ++row) seen.join(*row, forbidden);
    const int32_t color = first_free(forbidden, words);
    if (color == NONE) return -1;
    colors[v] = color;
    for (const int32_t* row = graph.begin(v); row != graph.end(v); ++row) seen.add(*row, color);
    if (color >= used) used = color + 1;
  }
  return used;
}

// Star coloring: every path on four vertices has at least three colors; with `apart`, neighbours differ. Returns the
// number of colors, or -1 if 64 * words are too few. Each vertex has three color sets: `seen`, the colors of its
// neighbours; `twice`, the colors that several neighbours share; and `hubs`, the colors of the hubs of stars in which
// it is a spoke. A further neighbour must not get a color of `hubs`.
EXPORT long hodiff_color_star(long n, const int32_t* starts, const int32_t* columns, const int32_t* order, long apart,
                              long words, const int64_t* room, uint64_t* memory, int32_t* counts, uint64_t* forbidden,
                              int32_t* occurrences, int32_t* colors) {
  const Graph graph{starts, columns};
  Sets seen(room, memory, counts, words, 3, 0), twice(room, memory, counts, words, 3, 1);
  Sets hubs(room, memory, counts, words, 3, 2);
  int32_t used = 0;
  for (long i = 0; i < n; ++i) {
    const int32_t v = order[i];
    std::memset(forbidden, 0, words * sizeof *forbidden);
    for (const int32_t* w = graph.begin(v); w != graph.end(v); ++w) {
      const int32_t a = *w == v ? NONE : colors[*w];
      if (a < 0) continue;
      ++occurrences[a];
      if (apart) forbidden[a >> 6] |= uint64_t{1} << (a & 63);
    }
    for (const int32_t* w = graph.begin(v); w != graph.end(v); ++w) {
      const int32_t a = *w == v ? NONE : colors[*w];
      if (a == NONE) continue;
      // If several neighbours have the same color, v becomes their hub and they become spokes; else v can be a spoke.
      (occurrences[a] > 1 ? seen : hubs).join(*w, forbidden);
    }
    const int32_t color = first_free(forbidden, words);
    if (color == NONE) return -1;
    colors[v] = color;
    if (color >= used) used = color + 1;
    for (const int32_t* w = graph.begin(v); w != graph.end(v); ++w) {
      if (*w == v) continue;
      const int32_t a = colors[*w];
      if (seen.contains(*w, color)) {
        if (a >= 0) hubs.add(v, a);
        if (!twice.contains(*w, color)) {
          twice.add(*w, color);
          // So far w and its other neighbour x of this color were a star of two vertices. Now w is its hub.
          if (a >= 0)
            for (const int32_t* x = graph.begin(*w); x != graph.end(*w); ++x)
              if (*x != v && *x != *w && colors[*x] == color) {
                hubs.add(*x, a);
                break;
              }
        }
      } else {
        if (a >= 0 && occurrences[a] > 1) hubs.add(*w, color);
        seen.add(*w, color);
      }
    }
    for (const int32_t* w = graph.begin(v); w != graph.end(v); ++w)
      if (*w != v && colors[*w] >= 0) occurrences[colors[*w]] = 0;
  }
  return used;
}

// Acyclic coloring: neighbours differ, and every cycle has at least three colors. Returns the number of colors. The
// vertices of any two colors form trees, tracked by union-find. A node is a pair of a vertex and a color of its
// neighbours, and belongs to a tree of these two colors. The nodes of vertex v begin at starts[v]; counts[v] is their
// number, and `nodes` has their colors.
EXPORT long hodiff_color_acyclic(long n, const int32_t* starts, const int32_t* columns, const int32_t* order,
                                 int32_t* nodes, int32_t* counts, int32_t* parents, int32_t* sizes, int32_t* reached,
                                 int32_t* forbidden, int32_t* occurrences, int32_t* node_of, int32_t* colors) {
  const Graph graph{starts, columns};
  const Components trees{parents, sizes};
  int32_t used = 0;
  for (long i = 0; i < n; ++i) {
    const int32_t v = order[i];
    for (const int32_t* w = graph.begin(v); w != graph.end(v); ++w)
      if (*w != v && colors[*w] != NONE) {
        ++occurrences[colors[*w]];
        forbidden[colors[*w]] = v;
      }
    // v closes a two-colored cycle only through two neighbours of the same color in the same tree.
    for (const int32_t* w = graph.begin(v); w != graph.end(v); ++w) {
      if (*w == v || colors[*w] == NONE || occurrences[colors[*w]] < 2) continue;
      for (int32_t node = starts[*w]; node < starts[*w] + counts[*w]; ++node) {
        if (forbidden[nodes[node]] == v) continue;
        const int32_t tree = trees.find(node);
        if (reached[tree] == v) forbidden[nodes[node]] = v;
        reached[tree] = v;
      }
    }
    int32_t color = 0;
    while (forbidden[color] == v) ++color;
    colors[v] = color;
    if (color >= used) used = color + 1;
    for (int32_t node = starts[v]; node < starts[v] + counts[v]; ++node) node_of[nodes[node]] = node;
    for (const int32_t* w = graph.begin(v); w != graph.end(v); ++w) {
      if (*w == v) continue;
      const int32_t first = starts[*w], last = first + counts[*w];
      int32_t node = first;
      while (node < last && nodes[node] != color) ++node;
      if (node == last) {
        nodes[node] = color;
        parents[node] = node;
        sizes[node] = 1;
        ++counts[*w];
      }
      if (colors[*w] != NONE) {
        occurrences[colors[*w]] = 0;
        trees.unite(node, node_of[colors[*w]]);
      }
    }
  }
  return used;
}

// Dynamic vertex orders: repeatedly take the vertex with the least or the largest degree, and change the degrees of its
// remaining neighbours by 1 (`rising`) or -1. If `least`, the order is written from its end. `initial` is the order in
// which vertices enter the buckets, `degrees` are their initial degrees, and `most` is the largest one.
EXPORT void hodiff_color_order(long n, const int32_t* starts, const int32_t* columns, const int32_t* row_starts,
                               const int32_t* row_columns, const int32_t* initial, long rising, long least, long most,
                               int32_t* heads, int32_t* next, int32_t* previous, int32_t* degrees, int32_t* visited,
                               int32_t* order) {
  const Graph graph{starts, columns}, rows{row_starts, row_columns};
  const Buckets buckets{heads, next, previous, degrees};
  for (long i = 0; i < n; ++i) buckets.enter(initial[i]);
  long at = least ? 0 : most;
  for (long i = 0; i < n; ++i) {
    while (heads[at] == NONE) at += least ? 1 : -1;
    const int32_t v = heads[at];
    buckets.leave(v);
    degrees[v] = NONE;
    order[least ? n - 1 - i : i] = v;
    each_neighbor(graph, rows, visited, static_cast<int32_t>(i), v, [&](int32_t w) {
      if (degrees[w] == NONE) return;
      buckets.leave(w);
      degrees[w] += rising ? 1 : -1;
      buckets.enter(w);
      if (least ? degrees[w] < at : degrees[w] > at) at = degrees[w];
    });
  }
}

// For each column, the number of other columns that share a row with it.
EXPORT void hodiff_color_degrees(long n, const int32_t* starts, const int32_t* columns, const int32_t* row_starts,
                                 const int32_t* row_columns, int32_t* visited, int32_t* degrees) {
  const Graph graph{starts, columns}, rows{row_starts, row_columns};
  for (long v = 0; v < n; ++v) {
    int32_t count = 0;
    each_neighbor(graph, rows, visited, static_cast<int32_t>(v), static_cast<int32_t>(v), [&](int32_t) { ++count; });
    degrees[v] = count;
  }
}

// Number the pairs of a row and a color of its columns in order of appearance. `pairs` gets the pair of each entry, and
// `sizes` the number of entries of each pair. Returns the number of pairs.
EXPORT long hodiff_color_pairs(long n, const int32_t* starts, const int32_t* columns, const int32_t* colors,
                               int32_t* latest, int32_t* pairs, int32_t* sizes) {
  int32_t found = 0;
  for (long row = 0; row < n; ++row) {
    const int32_t before = found;
    for (int32_t entry = starts[row]; entry < starts[row + 1]; ++entry) {
      int32_t& pair = latest[colors[columns[entry]]];
      if (pair < before) sizes[pair = found++] = 0;
      pairs[entry] = pair;
      ++sizes[pair];
    }
  }
  return found;
}

// Root the trees of a forest at their centres: remove the leaves layer by layer. A removed node has one neighbour left,
// its parent. `neighbors` has the exclusive or of a node's remaining neighbours, so it is the parent then. `places`
// gets the positions of all nodes except roots in a depth-first walk, `sizes` the number of nodes of each subtree, and
// `depths` the depth below the roots' children. `degrees` and `neighbors` must be zero; `neighbors` returns the
// parents, -1 for roots.
EXPORT void hodiff_color_forest(long nodes, long edges, const int32_t* from, const int32_t* to, int32_t* degrees,
                                int32_t* neighbors, int32_t* queue, int32_t* sizes, int32_t* places, int32_t* depths) {
  long last = 0;
  for (long edge = 0; edge < edges; ++edge) {
    ++degrees[from[edge]], ++degrees[to[edge]];
    neighbors[from[edge]] ^= to[edge], neighbors[to[edge]] ^= from[edge];
  }
  for (long node = 0; node < nodes; ++node) {
    sizes[node] = 1;
    if (degrees[node] == 1) queue[last++] = static_cast<int32_t>(node);
  }
  long kept = 0;
  for (long first = 0; first < last; ++first) {
    const int32_t node = queue[first];
    if (degrees[node] == 0) continue;  // a root
    const int32_t parent = neighbors[node];
    degrees[node] = NONE;
    neighbors[parent] ^= node;
    sizes[parent] += sizes[node];
    if (--degrees[parent] == 1) queue[last++] = parent;
    queue[kept++] = node;
  }
  // The remaining nodes have degree 0 and are roots. The places of a tree follow those of the previous tree.
  int32_t place = 0;
  for (long node = 0; node < nodes; ++node)
    if (degrees[node] == 0) {
      places[node] = place - 1;
      depths[node] = -1;
      place += sizes[node] - 1;
      neighbors[node] = NONE;
    }
  // Visit parents before their children. `degrees` now counts the descendants of a node that have places already.
  for (long node = 0; node < nodes; ++node) degrees[node] = 0;
  for (long i = kept - 1; i >= 0; --i) {
    const int32_t node = queue[i], parent = neighbors[node];
    places[node] = places[parent] + 1 + degrees[parent];
    degrees[parent] += sizes[node];
    depths[node] = depths[parent] + 1;
  }
}
