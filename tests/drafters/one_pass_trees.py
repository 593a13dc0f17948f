"""Options of the trees that `pard` and `p-eagle` draft."""

TREES = {
    "chain": "tree=chain,length=5,adaptive=false",
    "one token": "tree=chain,length=1,adaptive=false",
    "ddtree": "length=4,nodes=30,adaptive=false",
    "jetspec": "tree=jetspec,length=4,top_k=4,nodes=20,adaptive=false",
    "fewer nodes than levels": "length=9,nodes=4,adaptive=false",
    "what pays": "length=5,nodes=30",
}
